"""The command line started as two processes: one speaks and writes, and the result is that of one process."""

import json
import os
import sys

import pytest
import torch
import transformers
from support.processes import launch

SCRIPT = os.path.join(os.path.dirname(sys.executable), "linearize")


def start(processes, root, logs, *arguments):
    """Run the console script and return its output."""
    line = [SCRIPT, "convert", root / "gpt2", "--dataset", root / "data.jsonl", *arguments]
    return launch(line, processes, logs)


def test_a_childs_own_error_is_shown(folders, tmp_path):
    with pytest.raises(AssertionError, match=r"process 0 said:\n(.|\n)*linearize: error: .*nowhere"):
        start(2, folders, tmp_path / "logs", "--dataset", tmp_path / "nowhere.jsonl", "--output", tmp_path / "out")


@pytest.mark.timeout(900)
def test_two_processes_convert_like_one(folders, tmp_path, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    common = ["--holdout", 8, "--distill-steps", 4, "--save-every", 2, "--bucket-by-length", "--json"]
    one = start(1, folders, logs, *common, "--batch-size", 8, "--device", "cpu", "--output", tmp_path / "one")
    two = start(2, folders, logs, *common, "--batch-size", 4, "--output", tmp_path / "two")
    whole, parts = json.loads(one), json.loads(two)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    for time in ("before", "after"):
        one, two = (found["distillation"][time]["mean"]["kl"] for found in (whole, parts))
        assert one == pytest.approx(two, abs=1e-6)
    one, two = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "two"))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
