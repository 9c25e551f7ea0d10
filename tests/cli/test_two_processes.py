"""The command line started as two processes: one speaks and writes, and the result is that of one process."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from test_cli import folders  # noqa: F401 - a fixture

TWO = ["torch.distributed.run", "--nproc_per_node", "2", "--no-python", "--master_port"]


def start(processes, root, *arguments):
    """Run the console script and return its output."""
    script = os.path.join(os.path.dirname(sys.executable), "linearize")
    front = [sys.executable, "-m", *TWO, str(20_000 + os.getpid() % 9_000)] if processes == 2 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    line = [*front, script, "convert", root / "gpt2", "--dataset", root / "data.jsonl", *arguments]
    done = subprocess.run([str(part) for part in line], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_two_processes_convert_like_one(folders, tmp_path):  # noqa: F811
    common = ["--holdout", 8, "--distill-steps", 4, "--save-every", 2, "--bucket-by-length", "--json"]
    whole = json.loads(start(1, folders, *common, "--batch-size", 8, "--device", "cpu", "--output", tmp_path / "one"))
    parts = json.loads(start(2, folders, *common, "--batch-size", 4, "--output", tmp_path / "two"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    for time in ("before", "after"):
        one, two = (found["distillation"][time]["mean"]["kl"] for found in (whole, parts))
        assert one == pytest.approx(two, abs=1e-6)
    one, two = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "two"))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
