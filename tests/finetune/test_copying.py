"""Passages that stand twice: what is counted, against a model by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.tasks import WORDS, causal_folder, no_rows

from linearize.core.errors import ConfigError, DataError
from linearize.jobs.evaluate import evaluate_checkpoint
from linearize.jobs.task_config import EvaluateJob


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("copying")
    causal_folder(root / "llama", 64)
    (root / "set").mkdir()
    for split in ("train", "validation"):
        (root / "set" / f"{split}.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 100)))
    return root


def measured(place, length):
    options = {"task": "copying", "dataset": str(place / "set"), "device": "cpu", "max_length": length}
    return evaluate_checkpoint(EvaluateJob.of(model=str(place / "llama"), **options))


def test_figures_by_hand(place):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = measured(place, 32)
    model = AutoModelForCausalLM.from_pretrained(place / "llama").eval()
    text = (place / "set" / "validation.txt").read_text()
    ids = AutoTokenizer.from_pretrained(place / "llama")(text, add_special_tokens=False)["input_ids"]
    right, again, first = [], [], []
    for start in range(0, 100 - 15, 16):
        passage = ids[start : start + 16]
        logits = model(torch.tensor([passage + passage])).logits.detach().double().log_softmax(-1)[0]
        right += [int(logits[15 + i].argmax()) == passage[i] for i in range(1, 16)]
        again += [-float(logits[15 + i, passage[i]]) for i in range(1, 16)]
        first += [-float(logits[i - 1, passage[i]]) for i in range(1, 16)]
    assert found.figures["copy_accuracy"] == found.score == pytest.approx(np.mean(right))
    assert found.figures["nll_copy"] == pytest.approx(np.mean(again), rel=1e-5)
    assert found.figures["nll_first"] == pytest.approx(np.mean(first), rel=1e-5)
    assert found.facts["context"] == 32 and found.facts["rows"] == 6 and found.interval is not None


def test_a_model_that_copies_is_right():
    from linearize.training.stage_two.task_types.language import Copies

    copying = no_rows("copying").type
    copying.front = []
    rows = Copies(np.random.default_rng(0).integers(0, 9, 40).astype(np.int32), 8)
    batch = copying.collate([rows[0], rows[3]])
    # What stands 7 places before is what comes next, in the second reading.
    logits = torch.full((2, 16, 9), -100.0)
    for row in range(2):
        for place in range(7, 16):
            logits[row, place, batch["input_ids"][row, place - 7]] = 100.0
    sums = copying.reduce(logits, batch["labels"]).numpy()
    assert sums[:, 3].tolist() == sums[:, 4].tolist() == [7, 7]
    found = copying.compute_metrics(sums, np.empty(0))
    assert found["copy_accuracy"] == 1 and found["nll_copy"] == 0 and found["nll_first"] > 1


def test_what_does_not_fit_is_refused(place):
    with pytest.raises(ConfigError, match="expected at least 4: each passage appears twice"):
        measured(place, 3)
    (place / "short").mkdir()
    for split in ("train", "validation"):
        (place / "short" / f"{split}.txt").write_text(" ".join(WORDS[:5]))
    options = {"task": "copying", "dataset": str(place / "short"), "device": "cpu", "max_length": 64}
    with pytest.raises(DataError, match="got 5 training tokens, expected a passage of 32"):
        evaluate_checkpoint(EvaluateJob.of(model=str(place / "llama"), **options))
