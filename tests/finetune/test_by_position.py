"""The loss by the number of tokens before the predicted one, against the same by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.tasks import WORDS, causal_folder

from linearize.cli import main
from linearize.jobs.evaluate import evaluate_checkpoint
from linearize.jobs.task_config import EvaluateJob
from linearize.training.stage_two.metrics import EDGES, losses_by_position, range_sums


def test_ranges_against_a_loop():
    chance = torch.Generator().manual_seed(0)
    counted = (torch.rand(3, 300, generator=chance) > 0.3).float()
    counted[:, 200:] = 0
    nll = torch.rand(3, 300, generator=chance) * counted
    found = losses_by_position(range_sums(nll, counted).numpy())
    assert [one.first for one in found] == [1, 64, 128]
    assert found[-1].last == max(t + 1 for row in counted for t in range(300) if row[t])
    for one in found:
        end = EDGES[EDGES.index(one.first) + 1]
        inside = [(row, t) for row in range(3) for t in range(300) if one.first <= t + 1 < end and counted[row, t]]
        assert one.tokens == len(inside)
        assert one.nll == pytest.approx(np.mean([float(nll[place]) for place in inside]), rel=1e-5)


def test_evaluate_shows_them(tmp_path, capsys):
    causal_folder(tmp_path / "llama", 160)
    (tmp_path / "set").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "set" / f"{split}.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 400)))
    options = {"task": "causal-lm", "dataset": str(tmp_path / "set"), "device": "cpu", "max_length": 160}
    [side] = evaluate_checkpoint(EvaluateJob.of(model=str(tmp_path / "llama"), **options)).sides
    assert [(one.first, one.last) for one in side.by_position] == [(1, 63), (64, 127), (128, 159)]
    # Of 400 words every one but the first is predicted once.
    assert sum(one.tokens for one in side.by_position) == side.metrics["tokens"] == 399
    total = sum(one.nll * one.tokens for one in side.by_position)
    assert total / 399 == pytest.approx(side.metrics["nll"], rel=1e-5)

    command = ["evaluate", str(tmp_path / "llama"), "--task", "causal-lm", "--dataset", str(tmp_path / "set")]
    assert main([*command, "--device", "cpu", "--max-length", "160"]) == 0
    shown = capsys.readouterr().out
    assert "Loss by number of preceding tokens" in shown
    assert f"{side.by_position[2].nll:.4f}" in shown and "128 to 159" in shown
