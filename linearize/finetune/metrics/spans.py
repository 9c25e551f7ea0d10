"""Exact match and word F1 of extracted answers, as SQuAD's script counts them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import ClassVar

import datasets

from linearize.finetune.metrics.base import PackageMetric

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without punctuation, English articles and extra white space."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def word_f1(guess: str, answer: str) -> float:
    """Return the F1 over words; two empty answers agree."""
    ours, theirs = normalise(guess).split(), normalise(answer).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


def agreement(guess: str, answers: Iterable[str]) -> dict[str, float]:
    """Return how well a text agrees with the best of its reference texts; no reference means "no answer"."""
    known = list(answers) or [""]
    exact = max(float(normalise(guess) == normalise(answer)) for answer in known)
    return {"exact_match": exact, "span_f1": max(word_f1(guess, answer) for answer in known)}


class Spans(PackageMetric):
    """Best agreement of each predicted text with any of its reference texts; no reference means "no answer"."""

    source = "https://arxiv.org/abs/1606.05250"
    fields: ClassVar[dict[str, object]] = {
        "predictions": datasets.Value("string"),
        "references": datasets.Sequence(datasets.Value("string")),
    }

    def _compute(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        found = [agreement(guess, answers) for guess, answers in zip(predictions, references, strict=True)]
        return {name: sum(one[name] for one in found) / max(1, len(found)) for name in ("exact_match", "span_f1")}
