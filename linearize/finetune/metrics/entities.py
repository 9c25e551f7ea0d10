"""Entity-level F1 of token classification, as CoNLL counts it: an entity is right if type and both ends are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import datasets

from linearize.finetune.metrics.base import PackageMetric


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Return (type, first, last + 1) of the entities in a row of tags such as B-PER, I-PER, O.

    An I- that does not go on with what was before begins an entity of its own, as in CoNLL's script. Where no tag has
    a prefix, every token that is not O is an entity of its own.
    """
    found: set[tuple[str, int, int]] = set()
    kind, start = "", 0
    for place, tag in enumerate([*tags, "O"]):
        prefix, dash, name = tag.partition("-")
        if not dash:
            name = "" if tag == "O" else tag
            prefix = "B"
        if kind and (not name or prefix in ("B", "S") or name != kind):
            found.add((kind, start, place))
            kind = ""
        if name and not kind:
            kind, start = name, place
    return found


class Entities(PackageMetric):
    """Precision, recall and F1 over entities, and accuracy over tokens."""

    source = "https://aclanthology.org/W03-0419"
    fields: ClassVar[dict[str, object]] = {
        "predictions": datasets.Sequence(datasets.Value("string")),
        "references": datasets.Sequence(datasets.Value("string")),
    }

    def _compute(self, predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> dict[str, float]:
        counts = [entity_counts(*pair) for pair in zip(predictions, references, strict=True)]
        return of_counts({name: sum(one[name] for one in counts) for name in COUNTS})


COUNTS = ("hits", "predicted", "true", "right", "tokens")


def entity_counts(guess: Sequence[str], answer: Sequence[str]) -> dict[str, int]:
    """Count a row's entities (found, predicted, true) and its tokens (right, all)."""
    ours, theirs = entities(guess), entities(answer)
    right = sum(a == b for a, b in zip(guess, answer, strict=True))
    return dict(zip(COUNTS, (len(ours & theirs), len(ours), len(theirs), right, len(answer)), strict=True))


def of_counts(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of summed or averaged counts; 0 where a share is of nothing."""
    hits, predicted, true, right, tokens = (counts[name] for name in COUNTS)
    return {
        "precision": hits / predicted if predicted else 0.0,
        "recall": hits / true if true else 0.0,
        "entity_f1": 2 * hits / (predicted + true) if predicted + true else 0.0,
        "token_accuracy": right / tokens if tokens else 0.0,
    }
