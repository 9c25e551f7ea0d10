"""The texts whose prediction changed most between the original and the converted classifier (or regression)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.checkpoint.loading import Loaded
from linearize.conversion.positions import current_length
from linearize.core.heads import HEADS, head_of_class
from linearize.data.records import Example
from linearize.evaluation.report.inputs import encode
from linearize.training.stage_two.load import label_order

SHOWN = 8
"""Most texts in the table."""
CHARACTERS = 400
"""Characters of a text that are shown."""
CLASS, NUMBER, SEVERAL = "single_label_classification", "regression", "multi_label_classification"
"""Kinds of predictions, as transformers' `problem_type` has them."""


@dataclass(frozen=True)
class Change:
    """One text.

    Attributes:
        text: its first `CHARACTERS`; both texts of a pair.
        original: the original's label, or number.
        converted: the converted model's.
        original_probability: of the original's label; None for numbers and for several labels.
        converted_probability: of the converted model's label.
        difference: half the sum of the probabilities' differences (total variation), 0 to 1; for a model with
            several labels the largest difference of a probability, for numbers the absolute difference.
    """

    text: str
    original: str
    converted: str
    original_probability: float | None
    converted_probability: float | None
    difference: float


@dataclass(frozen=True)
class Changes:
    """The predictions on all texts.

    Attributes:
        kind: what is predicted: `CLASS`, `NUMBER` or `SEVERAL`.
        texts: how many were read.
        same: how many got the same label or labels; None for numbers.
        largest: the texts whose prediction changed most, the most first.
    """

    kind: str
    texts: int
    same: int | None
    largest: tuple[Change, ...]


def has_predictions(loaded: Loaded) -> bool:
    """Tell whether a model classifies texts, or gives numbers for them."""
    return loaded.modality == "text" and head_of_class(type(loaded.model).__name__) == HEADS["text-classification"]


def why_not(original: Loaded | None, converted: Loaded, texts: Sequence[Example]) -> str:
    """Return why predictions cannot be compared; empty if they can, or if the model predicts no label."""
    if not has_predictions(converted):
        return ""
    if not texts:
        return "the texts are the built-in ones, which are not of its task; name data with --dataset"
    if original is None:
        return "there is no original to compare with; give the one with a trained head with --original"
    if not has_predictions(original):
        name = type(original.model).__name__
        return f"the original is a {name}, without a trained head; give the tuned one with --original"
    counts = [model.config.num_labels for model in (original.model, converted.model)]
    if counts[0] != counts[1]:
        return f"the original has {counts[0]} labels, this model {counts[1]}; give the one tuned alike with --original"
    return ""


@torch.no_grad()
def compare_predictions(original: Loaded, converted: Loaded, texts: Sequence[Example], length: int) -> Changes:
    """Compare what two models predict for the same texts.

    Args:
        original: the softmax model, with the same labels.
        converted: the converted one, whose tokenizer and label names are used.
        texts: examples [N].
        length: most tokens per text; both models read fewer if the original takes fewer.
    """
    config = converted.model.config
    names = _names(converted.model)
    kind = config.problem_type or (NUMBER if config.num_labels == 1 else CLASS)
    batches = encode(converted, texts, min(length, current_length(original.model) or length))
    logits = [torch.cat([_logits(one.model, batch) for batch in batches]) for one in (original, converted)]
    order = label_order(_names(original.model), names)
    first, second = logits[0] if order is None else logits[0][:, order], logits[1]
    probabilities = [
        x if kind == NUMBER else x.sigmoid() if kind == SEVERAL else x.softmax(dim=-1) for x in (first, second)
    ]
    apart = (probabilities[0] - probabilities[1]).abs()
    differences = apart.sum(dim=-1) / 2 if kind == CLASS else apart.amax(dim=-1)
    first_labels, second_labels = (_labels(x, names, kind) for x in probabilities)
    by_change = differences.argsort(descending=True, stable=True).tolist()
    # A text that comes twice is shown once.
    largest = list({_shown(texts[row]): row for row in reversed(by_change)}.values())[::-1][:SHOWN]
    changes = [
        Change(
            text=_shown(texts[row]),
            original=first_labels[row][0],
            converted=second_labels[row][0],
            original_probability=first_labels[row][1],
            converted_probability=second_labels[row][1],
            difference=float(differences[row]),
        )
        for row in largest
    ]
    pairs = zip(first_labels, second_labels, strict=True)
    same = None if kind == NUMBER else sum(label == other for (label, _), (other, _) in pairs)
    return Changes(kind, len(texts), same, tuple(changes))


def _names(model: PreTrainedModel) -> list[str]:
    """Return the labels of a model's outputs, in order."""
    return [str(name) for _, name in sorted((model.config.id2label or {}).items())]


def _logits(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    device = next(model.parameters()).device
    return model(**{name: value.to(device) for name, value in batch.items()}).logits.double().cpu()


def _labels(values: Tensor, names: Sequence[str], kind: str) -> list[tuple[str, float | None]]:
    """Return label and probability for each row of [N, C]."""
    if kind == NUMBER:
        return [(", ".join(f"{value:.3g}" for value in row), None) for row in values.tolist()]
    if kind == SEVERAL:
        chosen = [[name for name, value in zip(names, row, strict=True) if value > 0.5] for row in values.tolist()]
        return [(", ".join(labels) or "none", None) for labels in chosen]
    best = values.max(dim=-1)
    return [(names[place], value) for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)]


def _shown(example: Example) -> str:
    text = " | ".join(" ".join(str(part).split()) for part in (example.value, example.pair) if part is not None)
    return text if len(text) <= CHARACTERS else f"{text[: CHARACTERS - 1]}…"
