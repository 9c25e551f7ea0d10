"""Every stage ends with a verdict, the line that loads, and the next command, which runs."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from support.checkpoints import make_original, texts
from support.command_lines import run

from linearize.cli import main
from linearize.cli.main import build_parser
from linearize.jobs.command import command_of
from linearize.jobs.config import ConvertJob

DATA = "--dataset texts.jsonl --text-column text --holdout 8 --batch-size 4 --device cpu"
TASK = "--task text-classification --dataset texts.jsonl --columns text --max-length 16 --batch-size 8 --device cpu"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("findings")
    texts(root, 96)
    make_original(root / "bert")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main(f"convert bert {DATA} --distill-steps 8 --eval-every 2 --align-steps 0 --output plain".split()) == 0
    return root


CASES = {
    "convert": (f"convert bert {DATA} --distill-steps 8 --eval-every 2 --align-eval-every 1 --max-length 128 "
                "--distill-length 32 --output made", ["stage one", "alignment"]),
    "distill": (f"distill plain {DATA} --distill-steps 8 --eval-every 2 --output further", ["stage one"]),
    "align": (f"align plain {DATA} --steps 8 --eval-every 1 --output aligned", ["alignment"]),
    "finetune": (f"finetune plain {TASK} --steps 8 --eval-every 2 --output tuned", ["stage two"]),
    "untouched": (f"convert bert {DATA} --distill-steps 0 --align-steps 0 --output untouched", []),
    "original": (f"finetune bert {TASK} --steps 8 --eval-every 2 --learning-rate 0 --output original", ["stage two"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_stage_ends_with_findings(case, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    words, stages = CASES[case]
    code, out, err = run(capsys, *words.split(), "--json")
    assert code == 0, err
    found = json.loads(out)["findings"]
    assert list(found["trends"]) == stages
    assert all(one["verdict"] in ("falling", "flat", "rising", "start", "unknown") for one in found["trends"].values())
    # What programs get is what people read, on stderr here.
    said = err.strip().splitlines()[-6:]
    assert f"Load it: {found['load']}" in said and said[-1] == f"Next, {found['why']}: {found['command']}"
    assert [line.partition(":")[0] for line in said if line.startswith("Verdict")] == [f"Verdict, {s}" for s in stages]
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


def test_the_next_command_follows_from_what_was_found(place, capsys, monkeypatch):
    """A loss that still falls is trained on: with what the same job was given, and the steps that would pay."""
    monkeypatch.chdir(place)
    from linearize.jobs import conclude
    from linearize.jobs.trend import Trend

    falling = Trend("falling", 8, 120, False, 0.2, 8)
    monkeypatch.setattr(conclude.findings, "stage_one_trend", lambda *_: falling)
    monkeypatch.setattr(conclude.findings, "stage_two_trend", lambda *_: falling)
    wanted = {
        "distill": f"linearize distill further2 {DATA} --distill-steps 120",
        "finetune": f"linearize finetune plain {TASK} --steps 128 --overwrite --eval-every 2 --output tuned2",
    }
    for verb, line in wanted.items():
        words = CASES[verb][0].replace("further", "further2").replace("tuned", "tuned2")
        _, out, _ = run(capsys, *words.split(), "--json")
        assert set(shlex.split(json.loads(out)["findings"]["command"])) == set(line.split())
    job = ConvertJob.of(model="bert", distill_steps=8)
    assert command_of("convert", job, {"distill_steps": 128}) == "linearize convert bert --distill-steps 128"


def test_longer_rows_are_proposed_where_the_data_has_them():
    """The rows of short data were never cut, and converting again for 1,024 tokens would have learned nothing more."""
    from types import SimpleNamespace

    from linearize.jobs import conclude
    from linearize.jobs.findings import Lengths

    job = ConvertJob.of(model="bert", max_length=1024, distill_steps=8)
    for seen, why in ((37, None), (256, "for longer rows")):
        context = SimpleNamespace(source=SimpleNamespace(options={"max_length": 256}))
        found = conclude._convert_on(context, job, {}, Lengths(seen, 1024))
        assert (found and found[0]) == why
    assert found[1].endswith("--distill-length 1024 --query-sample 256 --batch-size 1 --overwrite")
