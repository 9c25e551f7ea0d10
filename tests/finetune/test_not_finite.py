"""A comparison with NaN is false, so NaN ranks somewhere, often first: every figure of NaN or infinity is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.tasks import WORDS, no_rows, write
from support.tiny import SMALLER, original

from linearize.core.errors import DataError
from linearize.evaluation.report.paired import best_by
from linearize.fidelity.measure import measure_layers
from linearize.jobs.evaluate import evaluate_checkpoint
from linearize.jobs.task_config import EvaluateJob
from linearize.training.stage_two.metrics import METRICS, losses_by_position, part_ranks, ranks
from linearize.training.stage_two.rows import IGNORED
from linearize.training.stage_two.task_types.base import ClassLabels
from linearize.training.stage_two.task_types.embeddings import Retrieval, Similarity
from linearize.training.stage_two.task_types.language import LanguageType
from linearize.training.stage_two.task_types.tokens import QuestionAnswering, TokenLabels
from linearize.training.stage_two.tasks import TASKS

BAD = [float("nan"), float("inf")]
ROWS = 8
ARGUMENTS = {
    **{name: [(ROWS,), (ROWS,)] for name in METRICS},
    **{name: [(ROWS, 5)] for name in ("copying", "entities")},
    "multi_label": [(ROWS, 5), (ROWS, 5)],
    "spans": [(ROWS, 2)],
    "ranks": [(ROWS, 3), (ROWS, 3)],
    "part_ranks": [(ROWS, 2, 3), (ROWS, 2, 3)],
    "losses_by_position": [(ROWS, 48)],
}
FUNCTIONS = {**METRICS, "ranks": ranks, "part_ranks": part_ranks, "losses_by_position": losses_by_position}


@pytest.mark.parametrize("bad", [*BAD, -float("inf")])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_metric_refuses_every_argument(name, bad):
    chance = np.random.default_rng(0)
    arrays = [chance.integers(1, 3, size=shape).astype(np.float64) for shape in ARGUMENTS[name]]
    FUNCTIONS[name](*(x if name in ("ranks", "part_ranks") else x.astype(np.int64) for x in arrays))
    for place in range(len(arrays)):
        spoilt = [x.copy() for x in arrays]
        for row in (3, 5):
            spoilt[place].reshape(ROWS, -1)[row, 0] = bad
        with pytest.raises(DataError, match=rf"^{name}: got NaN or infinity in 2 of 8 rows \(number 3, 5, from 0\)"):
            FUNCTIONS[name](*spoilt)


def test_a_text_whose_parts_are_all_missing_is_refused():
    parts = np.ones((3, 2, 4))
    parts[1] = np.nan
    with pytest.raises(DataError, match=r"part_ranks: got NaN or infinity in 1 of 3 rows \(number 1, from 0\)"):
        part_ranks(np.ones((3, 2, 4)), parts)


def outputs_of(kind):
    """Return a model's outputs and labels, as a batch of tensors, for each type of task."""
    chance = torch.Generator().manual_seed(0)
    if issubclass(kind, QuestionAnswering):
        return tuple(torch.rand(ROWS, 6, generator=chance) for _ in range(2)), torch.zeros(ROWS)
    if issubclass(kind, TokenLabels | LanguageType):
        labels = torch.randint(2, (ROWS, 6), generator=chance)
        labels[:, -1] = IGNORED
        return torch.rand(ROWS, 6, 2, generator=chance), labels
    if issubclass(kind, Retrieval):
        return torch.rand(ROWS, 3, 2, 4, generator=chance), torch.arange(ROWS)
    if issubclass(kind, Similarity):
        return torch.rand(ROWS, generator=chance), torch.arange(ROWS) % 2
    width = 2 if issubclass(kind, ClassLabels) else 1
    return torch.rand(ROWS, width, generator=chance), torch.arange(ROWS) % 2


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", TASKS)
def test_every_task_refuses_a_model_whose_outputs_are_not_finite(name, bad):
    data = no_rows(name, **({"labels": ("O", "B-A")} if TASKS[name].label and not TASKS[name].labels else {}))
    kind = data.type
    kind.words, kind.tokens, kind.front = 5, 5, []
    kind.measured = [{"owner": row, "offsets": [(n, n + 1) for n in range(6)]} for row in range(ROWS)]
    kind.texts, kind.answers = ["letter"] * ROWS, [["t"]] * ROWS
    logits, labels = outputs_of(type(kind))

    def score(logits):
        kept = kind.reduce(logits, labels)
        return kind.compute_metrics(tuple(map(np.asarray, kept)) if isinstance(kept, tuple) else kept.numpy(), labels)

    assert all(np.isfinite(value) for value in score(logits).values())
    parts = logits if isinstance(logits, tuple) else (logits,)
    for part in parts:
        before = part.clone()
        for row in (2, 6):
            flat = part[row].view(-1)
            flat[min(1, len(flat) - 1)] = bad
        with pytest.raises(DataError, match=r"got NaN or infinity in 2 of 8 rows \(number 2, 6, from 0\), expected"):
            score(logits)
        part.copy_(before)


def test_what_is_not_scored_may_be_anything():
    """Special tokens and padding have no label."""
    data = no_rows("token-classification", labels=("O", "B-A"))
    logits, labels = outputs_of(type(data.type))
    expected = data.type.compute_metrics(data.type.reduce(logits, labels).numpy(), labels.numpy())
    logits[:, -1] = float("nan")
    logits[0, 0, 1 - int(labels[0, 0])] = -float("inf")
    found = data.type.compute_metrics(data.type.reduce(logits, labels).numpy(), labels.numpy())
    assert found["token_accuracy"] >= expected["token_accuracy"] and np.isfinite(list(found.values())).all()


@pytest.mark.parametrize("compare", [False, True])
def test_a_model_with_nan_has_no_score(tokenizer, tmp_path, compare):
    """With `--chunks` NaN was class 0, which is right for half of the rows."""
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 32, **SMALLER}
    for name in ("good", "bad"):
        model = original("bert", "AutoModelForSequenceClassification", num_labels=2, **sizes)
        with torch.no_grad():
            if name == "bad":
                model.bert.embeddings.word_embeddings.weight[tokenizer.convert_tokens_to_ids("film")] = float("nan")
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    texts = [" ".join(["film" if row in (1, 4) else "play", *WORDS[5:] * 3]) for row in range(6)]
    for split in ("train", "validation"):
        write(tmp_path / "set" / f"{split}.jsonl", [{"text": x, "label": row % 2} for row, x in enumerate(texts)])
    sides = {"compare": str(tmp_path / "bad"), "chunk_length": 8} if compare else {}
    job = EvaluateJob.of(
        model=str(tmp_path / ("good" if compare else "bad")),
        task="text-classification",
        dataset=str(tmp_path / "set"),
        device="cpu",
        **sides,
    )
    with pytest.raises(DataError, match=r"NaN or infinity in 2 of 6 rows \(number 1, 4, from 0\)"):
        evaluate_checkpoint(job)


def test_no_verdict_on_conversions_with_nan():
    """The one with NaN was named as the best."""
    figures = {"a": [float("nan")] * 7, "b": [0.1] * 7}
    with pytest.raises(DataError, match="KL, a: got NaN or infinity in 7 of 7 inputs"):
        best_by("KL", figures)


def test_no_closeness_of_a_layer_with_nan():
    from support.tiny import converted

    model = converted("bert", kernel="elu")
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if n.endswith("query.weight"))[0] = float("nan")
    with pytest.raises(DataError, match=r"^layer .*: got NaN or infinity in \d of \d heads"):
        measure_layers(model, [{"input_ids": torch.arange(1, 9)[None]}])
