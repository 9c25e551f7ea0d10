"""Small things that misled people: messages that name the option, tables that fit, numbers as people write them."""

from __future__ import annotations

import json
import os
import shutil
from types import SimpleNamespace

import pytest
from support import forks
from support.checkpoints import make_original, make_text, texts
from support.command_lines import run

from linearize.checkpoint import output
from linearize.cli._output import console, number, plan_table
from linearize.core.registry import kernel_infos
from linearize.modeling.plan import LayerPlan


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("edges")
    texts(root, 32)
    make_original(root / "bert")
    make_text(root / "linear")
    shutil.copytree(root / "bert", root / "damaged")
    weights = root / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    rows = [{"text": "the cat sat", "label": place % 2} for place in range(20)]
    lines = [json.dumps(row) for row in rows]
    (root / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (root / "config.yaml").write_text("{model_type: bert, hidden_size: x}")
    lines[4] = lines[4].replace(",", "")
    (root / "bad.jsonl").write_text("\n".join(lines) + "\n")
    return root


TASK = "--task text-classification --columns text"
REFUSED = {
    "damaged original": ("convert damaged --distill-steps 0 --output o", "its weights are damaged"),
    "damaged model": ("compare damaged linear", "'damaged' is not a converted checkpoint"),
    "bad line": ("convert bert --dataset bad.jsonl --output o", "'bad.jsonl' as json: ArrowInvalid: JSON parse error"),
    "no label": (f"finetune bert {TASK} --dataset texts.jsonl --label-column no", "another with --label-column"),
    "short": ("convert bert --max-length 8 --output o", "max_length: got 8, but 'bert' already takes 64 tokens"),
    "early tracker": ("convert bert --dataset rows.jsonl --report-to nobody --output o", "unknown report_to"),
    "tracker": ("convert bert --dataset rows.jsonl --report-to nobody --output o --dry-run", "unknown report_to"),
    "tuning's tracker": (
        f"finetune bert {TASK} --dataset rows.jsonl --report-to nobody --dry-run",
        "unknown report_to",
    ),
    "no window": ("convert bert --kernel none --output o", "kernel 'none': got no window, so no key"),
    "no scale": ("convert bert --kernel norm_elu --scale linear --output o", "kernel 'norm_elu' takes no scale"),
    "no features": (
        "convert bert --kernel none --window 4 --scale linear --output o",
        "'none' has no features to scale",
    ),
    "keys of a block": ("convert bert --kernel diag_softmax --window 4 --output o", "'diag_softmax' takes no window"),
    "exact keys alone": ("convert bert --exact-keys 4 --output o", "exact-keys: got 4 without a window"),
    "many exact keys": (
        "convert bert --window 4 --exact-keys 65 --output o",
        "exact-keys: got 65, but the model takes 64 tokens; choose fewer",
    ),
    "exact keys without scales": (
        "convert bert --window 4 --exact-keys 3 --scale none --output o",
        "exact-keys: got 3 for kernel 'hedgehog' without learned scales, by which the keys are chosen; use ",
    ),
    "exact keys of a signed kernel": (
        "convert bert --kernel flexformer_n --kernel-arg form=paper --window 4 --exact-keys 3 --output o",
        "for kernel 'flexformer_n' without learned scales, by which the keys are chosen; choose another kernel",
    ),
    "window": ("convert bert --window auto:0 --output o", "got 'auto:0', expected a number of tokens such as 64"),
    "config": ("init config.yaml --output o", "'hidden_size': TypeError: Field 'hidden_size' expected int, got str"),
    "no folder": ("inspect ./nofolder", "'./nofolder' does not exist"),
    "data of an unknown user": ("convert bert --dataset ~no-such-user/a.jsonl --output o", "/a.jsonl', which does not"),
    "rows of an unknown user": (f"finetune bert {TASK} --dataset ~no-such-user/rows", "/rows', which does not exist"),
    "options of an unknown user": ("convert bert --config ~no-such-user/a.yaml", "a.yaml' cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_one_line_that_says_what_to_do(case, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    before = sorted(os.listdir())
    line, words = REFUSED[case]
    device = [] if line.startswith(("inspect", "init")) else ["--device", "cpu"]
    code, out, err = run(capsys, *line.split(), *device)
    said = [text for text in err.splitlines() if text.startswith("linearize: error")]
    assert code == 2 and len(said) == 1 and words in said[0], err
    assert "Traceback" not in err and sorted(os.listdir()) == before
    if case in ("short", "early tracker"):
        assert "attentions become linear" not in out, "it is refused before the plan"


def test_a_damaged_model_to_measure_is_one_line(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    config = json.loads((place / "damaged" / "config.json").read_text())
    tuned = place / "damaged-tuned"
    shutil.copytree(place / "damaged", tuned)
    (tuned / "config.json").write_text(json.dumps(config | {"architectures": ["BertForSequenceClassification"]}))
    code, _, err = run(capsys, "evaluate", str(tuned), *TASK.split(), "--dataset", "rows.jsonl", "--device", "cpu")
    assert code == 2 and "its weights are damaged" in err and "Traceback" not in err
    shutil.rmtree(tuned)


def test_where_no_file_can_be_made_nobody_else_is_writing(tmp_path, monkeypatch):
    """/proc/x was "being written by another process": filelock waits where nothing can be made."""

    class Never:
        def __init__(self, file):
            pass

        def acquire(self, **options):
            raise output.Timeout("nothing there")

    monkeypatch.setattr(output, "FileLock", Never)
    with pytest.raises(output.CheckpointError, match="cannot be locked, as no file can be made in"):  # noqa: SIM117
        with output.claim(tmp_path / "x"):
            pass


def test_weights_can_be_read_by_whom_the_umask_lets(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(place)
    before = os.umask(0o027)
    try:
        target = tmp_path / "o"
        code, _, err = run(capsys, "convert", "bert", "--distill-steps", "0", "--align-steps", "0", "--output", target)
    finally:
        os.umask(before)
    assert code == 0, err
    assert (target / "model.safetensors").stat().st_mode & 0o777 == 0o640


def layer(index, module, reason="", heads=12):
    shape = SimpleNamespace(heads=heads, key_heads=heads, head_dim=32, causal=False)
    return LayerPlan(module, index, "softmax" if reason else "hedgehog", shape, reason=reason)


def printed(plan, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("linearize.conversion.plan.expectations", lambda plan: [])
    console().print(plan_table(plan))
    return capsys.readouterr().out


def test_equal_rows_of_a_plan_are_one(capsys, monkeypatch):
    layers = [layer(number, f"encoder.layer.{number}.attention.self") for number in range(6)]
    plan = SimpleNamespace(architecture="BertModel", converted=layers, layers=layers)
    text = printed(plan, capsys, monkeypatch, 90)
    assert text.count("hedgehog") == 1 and "0-5" in text and "encoder.layer.0-5.attention.self" in text
    assert "why it stays" not in text
    layers[2] = layer(2, "encoder.layer.2.attention.self", "kept on request")
    layers[4] = layer(4, "encoder.layer.4.attention.self", heads=6)
    text = printed(plan, capsys, monkeypatch, 120)
    assert text.count("hedgehog") == 4 and "0-1" in text and "why it stays" in text and "kept on request" in text


def test_kernels_fit_into_eighty_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(capsys, "kernels")[1].splitlines()
    assert max(map(len, lines)) <= 80 and sum(line.startswith("│") for line in lines) >= len(kernel_infos())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((2567940.3461, "2.57e6"), (12034.0, "12034"), (0.5, "0.500"), (1.0, "1.000"), (-1e-9, "0.000")),
        *((None, "-"), (float("inf"), "inf")),
    ],
)
def test_numbers_are_written_as_people_do(value, text):
    assert number(value) == text


def test_what_learns_nothing_has_no_learning_rate(capsys):
    assert "learning_rate" not in run(capsys, "kernels", "elu")[1]
    assert "learning_rate" in run(capsys, "kernels", "hedgehog")[1]


def test_recipes_say_what_they_need(capsys):
    facts = json.loads(run(capsys, "recipes", "--json")[1])
    assert all(fact["needs"] for fact in facts)


CLOSED = """
import os, sys
from linearize.cli import main
name = sys.argv[1]
os.close({"stdout": 1, "stderr": 2}[name])
setattr(sys, name, None)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.skipif(os.name != "posix", reason="closing standard streams is a matter of POSIX")
def test_streams_that_are_closed_stop_nothing():
    """As by `>&-` of a scheduler: "AttributeError: 'NoneType' object has no attribute 'isatty'" before any work."""
    assert forks.python(CLOSED, "stdout", "kernels", "elu") == forks.Done(0, "", "")
    done = forks.python(CLOSED, "stderr", "kernels", "elu", "--json")
    assert (json.loads(done.stdout)["name"], done.returncode) == ("elu", 0)
