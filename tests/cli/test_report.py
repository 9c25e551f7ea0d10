"""The verbs `report` and `compare`."""

import json

import pytest
from support import forks
from support.checkpoints import make_text, texts
from support.command_lines import run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("verbs")
    texts(root)
    for kernel in ("hedgehog", "elu"):
        make_text(root / kernel, kernel=kernel)
    return root


def common(made):
    return ["--dataset", made / "texts.jsonl", "--text-column", "text", "--inputs", 2, "--max-length", 16,
            "--device", "cpu"]  # fmt: skip


def test_report(made, tmp_path, capsys):
    out = tmp_path / "report"
    code, text, _ = run(capsys, "report", made / "hedgehog", *common(made), "--lengths", "none", "--output", out)
    assert code == 0
    assert "Kernel against softmax" in text and "Left out: Whole outputs" in text
    assert (out / "index.html").is_file() and (out / "images" / "maps.png").is_file()
    code, _, err = run(capsys, "report", made / "hedgehog", *common(made), "--output", out)
    assert (code, "--overwrite" in err) == (2, True)


def test_compare_prints_json(made, tmp_path, capsys):
    out = tmp_path / "cmp"
    code, text, err = run(
        capsys, "compare", made / "hedgehog", made / "elu", *common(made), "--lengths", "16", "--output", out, "--json"
    )
    assert code == 0
    found = json.loads(text)
    assert [c["kernels"] for c in found["conversions"]] == ["2 x hedgehog", "2 x elu"]
    assert json.loads((out / "comparison.json").read_text())["conversions"] == found["conversions"]
    assert "2 x elu" in err


def test_longer_inputs_and_lengths_than_the_model_takes(made, tmp_path, capsys):
    """The tiny models take 64 tokens: what is cut or left out is said, by both verbs."""
    long = ["--dataset", made / "texts.jsonl", "--text-column", "text", "--inputs", 2, "--max-length", 5000]
    long += ["--lengths", "4096", "--device", "cpu"]
    for verb, names in (("report", ["hedgehog"]), ("compare", ["hedgehog", "elu"])):
        code, text, err = run(capsys, verb, *[made / name for name in names], *long, "--output", tmp_path / verb)
        said = " ".join(text.split())
        assert code == 0, err
        assert "Inputs were cut to 64 tokens, the most that this checkpoint takes (requested: 5,000)" in said
        assert "Not timed at 4,096 tokens: this checkpoint takes at most 64" in said


def test_no_display_is_needed(made, tmp_path):
    """Neither a display nor a backend for one, whatever the environment asks for."""
    code = (
        "import os, sys; assert 'matplotlib' not in sys.modules\n"
        "for name in ('DISPLAY', 'WAYLAND_DISPLAY'): os.environ.pop(name, None)\n"
        "from linearize.cli import main; done = main(sys.argv[1:]); "
        "sys.exit(done or 3 * ('matplotlib.pyplot' in sys.modules or 'tkinter' in sys.modules))"
    )
    words = ["report", made / "hedgehog", *common(made), "--lengths", "none", "--output", tmp_path / "out"]
    done = forks.python(code, *words, environment={"MPLBACKEND": "TkAgg"})
    assert done.returncode == 0, done.stderr[-1000:]
    assert (tmp_path / "out" / "images" / "maps.png").is_file()


BAD = {
    "lengths": (["report", "DIR", "--lengths", "many"], "expected numbers such as 128,512,2048"),
    "inputs": (["report", "DIR", "--inputs", "0"], "at least 1"),
    "folder": (["report", "./nowhere"], "does not exist"),
    "device": (["report", "DIR", "--device", "cuda:9"], "this machine has"),
    "original": (["report", "DIR", "--original", "./nowhere"], "does not exist"),
    "option": (["report", "DIR", "--datset", "x"], "Did you mean --dataset"),
    "single": (["compare", "DIR"], "two or more"),
    "under a file": (["report", "DIR", "--output", "FILE/report"], "cannot be written to; choose another folder"),
    "a file": (["report", "DIR", "--output", "FILE"], "is a file, expected a folder"),
    "compare under a file": (["compare", "DIR", "DIR", "--output", "FILE/out"], "cannot be written to"),
    "compare a full folder": (["compare", "DIR", "DIR", "--output", "FULL"], "--overwrite"),
    "compare lengths": (["compare", "DIR", "DIR", "--lengths", "0"], "expected numbers of tokens"),
    "compare folder": (["compare", "DIR", "./nowhere"], "does not exist"),
    "compare original": (["compare", "DIR", "FULL", "--original", "./nowhere"], "does not exist"),
    "compare with itself": (["compare", "DIR", "FULL", "DIR"], "hedgehog' twice, expected different checkpoints"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, made, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, words = BAD[case]
    places = {"DIR": made / "hedgehog", "FILE": made / "texts.jsonl", "FULL": made / "elu"}
    places["FILE/report"], places["FILE/out"] = made / "texts.jsonl" / "report", made / "texts.jsonl" / "out"
    code, _, err = run(capsys, *[places.get(a, a) for a in arguments])
    assert code == 2
    assert words in err and len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
