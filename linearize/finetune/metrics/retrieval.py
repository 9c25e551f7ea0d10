"""How well texts are found again by their embeddings: recall at 1 and 10, mean reciprocal rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from linearize.finetune.metrics.base import NUMBERS, PackageMetric

DEPTHS = (1, 10)
BLOCK = 1_024
"""Queries that are compared with all texts at a time."""


def ranks(queries: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Return the rank [N], from 1, that each query's own text has among all by the cosine of their embeddings.

    Args:
        queries: [N, D].
        texts: [N, D]; the n-th belongs to the n-th query. One that is as near as the own one counts as nearer.
    """
    queries, texts = (_unit(np.asarray(one, dtype=np.float64)) for one in (queries, texts))
    own = np.einsum("nd,nd->n", queries, texts)
    found = np.empty(len(queries), dtype=np.int64)
    for begin in range(0, len(queries), BLOCK):
        block = slice(begin, begin + BLOCK)
        cosines = queries[block] @ texts.T
        places = np.arange(begin, begin + len(cosines))
        # The own one is left out of the count: a product of matrices rounds otherwise than a product of rows.
        cosines[places - begin, places] = -np.inf
        found[block] = 1 + (cosines >= own[block, None]).sum(axis=1)
    return found


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)


def by_rank(found: np.ndarray) -> dict[str, np.ndarray]:
    """Return what each rank [N] counts for, by the metric's name: the metrics are the means."""
    counts = {f"recall_at_{depth}": (found <= depth).astype(np.float64) for depth in DEPTHS}
    return {**counts, "mrr": 1.0 / found}


def by_chance(texts: int) -> dict[str, float]:
    """Return what a random order of so many texts reaches on average."""
    return {name: float(values.mean()) for name, values in by_rank(np.arange(1, texts + 1)).items()}


class Retrieval(PackageMetric):
    """Share of queries whose own text is found first, or among the first ten, and the mean of 1 / rank (MRR)."""

    source = "https://nlp.stanford.edu/IR-book/html/htmledition/evaluation-of-ranked-retrieval-results-1.html"
    fields = NUMBERS

    def _compute(self, predictions: Sequence[float] | np.ndarray, references: Sequence[float]) -> dict[str, float]:
        """Take ranks from 1 as predictions; the reference, the best rank, is 1 for every query."""
        return {name: float(values.mean()) for name, values in by_rank(np.asarray(predictions)).items()}
