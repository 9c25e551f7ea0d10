"""`convert --stream-blocks` from end to end, and what it refuses in one line."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import make_original, texts
from support.command_lines import run

from linearize.core.errors import ConfigError
from linearize.jobs.config import ConvertJob
from linearize.training.stage_one import streamed

LINE = "--dataset texts.jsonl --text-column text --holdout 8 --batch-size 4 --device cpu --distill-steps 4 --json"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts(tmp_path, 40)
    make_original(tmp_path / "llama", "llama", "AutoModelForCausalLM")
    return tmp_path


def test_a_killed_conversion_resumes_and_equals_one_of_the_whole_model(here, capsys, monkeypatch):
    """The output has the same weights, and no states are left beside it."""
    line = f"convert llama {LINE} --eval-every 2".split()
    code, _, err = run(capsys, *line, "--align-steps", 0, "--output", "whole")
    assert code == 0, err
    train, calls = streamed._train_block, []

    def once(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return train(*args)

    monkeypatch.setattr(streamed, "_train_block", once)
    line += ["--stream-blocks", "--output", "made"]
    code, _, err = run(capsys, *line)
    assert code == 130 and "1 finished blocks are in made.stage1; resume with the same line and --resume" in err
    code, _, err = run(capsys, *line)
    assert code == 2 and "--resume" in err and err.count("\n") == 1
    code, _, err = run(capsys, *line, "--resume")
    assert code == 0, err
    whole, made = (load_file(here / name / "model.safetensors") for name in ("whole", "made"))
    assert whole.keys() == made.keys() and all(torch.equal(whole[key], made[key]) for key in whole)
    assert not list(here.glob("made.*"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kernel": "auto"}, "kernel"),
        ({"window": "auto"}, "window"),
        ({"keep_softmax_heads": "2"}, "keep_softmax_heads"),
        ({"align_steps": 3}, "align_steps"),
        ({"save_every": 5}, "save_every"),
    ],
)
def test_options_that_need_the_whole_model_are_refused_before_it_is_loaded(options, named):
    with pytest.raises(ConfigError, match=rf"{named}: got .* with --stream-blocks"):
        ConvertJob.of(model="none", stream_blocks=True, **options)
    assert ConvertJob.of(model="none", stream_blocks=True).align.steps == 0
    assert ConvertJob.of(model="none", stream_blocks=True, output="made").distill.folder == "made.stage1"


def test_several_processes_are_refused(here, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run(capsys, *f"convert llama {LINE} --stream-blocks --output made".split())
    assert code == 2 and "stream-blocks: got several processes, expected one" in err


def test_a_dry_run_streams_too_and_counts_the_rows_on_disk(here, capsys):
    line = f"convert llama {LINE} --distill-length 16 --dry-run --output made".split()
    disk = {}
    for more in ([], ["--stream-blocks"]):
        code, out, err = run(capsys, *line, "--align-steps", 0, *more)
        assert code == 0 and "It fits. Nothing was written." in err, err
        disk[bool(more)] = json.loads(out)["bill"]["disk"]
    # Twice four batches of four rows of 16 tokens: 32 numbers of hidden state in fp32, and ids and mask.
    assert disk[True] - disk[False] >= 2 * 4 * 4 * 16 * (32 * 4 + 16)
    assert sorted(path.name for path in here.iterdir()) == ["llama", "texts.jsonl"]


def test_a_full_disk_is_one_line(here, capsys, monkeypatch):
    monkeypatch.setattr(streamed, "free_disk", lambda path: 1000)
    code, _, err = run(capsys, *f"convert llama {LINE} --stream-blocks --output made".split())
    lines = [line for line in err.splitlines() if "error" in line]
    assert code == 2 and len(lines) == 1 and "stream-blocks: the hidden states of all rows need" in lines[0]
    assert sorted(path.name for path in here.iterdir()) == ["llama", "texts.jsonl"]
