"""Every stage ends with the line that loads, and the next command, which runs."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from support.checkpoints import make_original, texts
from support.command_lines import run

from linearize.cli import main
from linearize.cli.main import build_parser

DATA = "--dataset texts.jsonl --text-column text --holdout 8 --batch-size 4 --device cpu"
TASK = "--task text-classification --dataset texts.jsonl --columns text --max-length 16 --batch-size 8 --device cpu"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("findings")
    texts(root, 96)
    for model in ("bert", "originals/other"):
        make_original(root / model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for model, output in (("bert", "plain"), ("originals/other", "moved/plain")):
            words = f"convert {model} {DATA} --distill-steps 8 --eval-every 2 --align-steps 0 --output {output}"
            assert main(words.split()) == 0
    return root


CASES = {
    "convert": f"convert bert {DATA} --distill-steps 8 --eval-every 2 --align-eval-every 1 --max-length 128 "
    "--distill-length 32 --output made",
    "distill": f"distill plain {DATA} --distill-steps 8 --eval-every 2 --output further",
    "align": f"align plain {DATA} --steps 8 --eval-every 1 --output aligned",
    # The folder that the original lay in is not recorded.
    "elsewhere": f"align moved/plain {DATA} --steps 8 --eval-every 1 --output realigned",
    "finetune": f"finetune plain {TASK} --steps 8 --eval-every 2 --output tuned",
    "untouched": f"convert bert {DATA} --distill-steps 0 --align-steps 0 --output untouched",
    "original": f"finetune bert {TASK} --steps 8 --eval-every 2 --learning-rate 0 --output original",
}


@pytest.mark.parametrize("case", CASES)
def test_a_stage_ends_with_findings(case, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    words = CASES[case]
    code, out, err = run(capsys, *words.split(), "--json")
    assert code == 0, err
    found = json.loads(out)["findings"]
    # What programs get is what people read, on stderr here.
    said = err.strip().splitlines()[-6:]
    assert f"Load it: {found['load']}" in said and said[-1] == f"Next, {found['why']}: {found['command']}"
    if found["lengths"] is not None:
        promised = {"convert": 128}.get(case, 64)
        assert found["lengths"]["promised"] == promised and 10 < found["lengths"]["seen"] <= 32
    next_words = shlex.split(found["command"])
    assert next_words[0] == "linearize"
    build_parser(next_words[1]).parse_args(next_words[2:])
    folder = re.search(r"from_pretrained\('(.*)'\)", found["load"])[1]
    assert (place / folder / "config.json").is_file()
    quick = {
        "report": "--lengths none --inputs 2 --max-length 16",
        "align": "--steps 2",
        "distill": "--distill-steps 2",
    }
    more = quick.get(next_words[1], f"{DATA} --distill-steps 2" if next_words[1] == "convert" else "")
    code, _, err = run(capsys, *next_words[1:], *more.split(), *output_of(next_words))
    assert code == 0, f"{found['command']}: {err}"


def output_of(words):
    return [] if words[1] == "evaluate" or "--output" in words else ["--output", f"next-{words[2]}", "--overwrite"]


def test_ctrl_c_after_the_result_was_saved_says_where_it_is(place, capsys, monkeypatch):
    """It said that nothing was written, or that --resume continues."""

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.chdir(place)
    monkeypatch.setattr("linearize.jobs.convert.after_training", interrupt)
    monkeypatch.setattr("linearize.jobs.finetune.after_tuning", interrupt)
    for line in (
        "convert bert --distill-steps 0 --align-steps 0 --device cpu",
        f"finetune plain {TASK} --steps 1",
    ):
        code, _, err = run(capsys, *line.split(), "--output", "cut", "--overwrite")
        assert code == 130 and "interrupted: the result is in cut\n" in err
        assert (place / "cut" / "model.safetensors").exists()
