"""How close attention comes to the speed of the machine's matrix products, its upper bound."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from linearize.evaluation.bench.meter import DTYPES, seconds_of
from linearize.evaluation.bench.rows import Row, ratio
from linearize.evaluation.bench.suites import AttentionSuite

PEAKS = (1024, 2048)
"""Rows of the square matrices that are multiplied to find the fastest product."""


def peak_rate(device: str, dtype: str, sizes: tuple[int, ...] = PEAKS, repeats: int = 5) -> float:
    """Return the operations per second of the fastest among a few square matrix products."""
    best = 0.0
    for size in sizes:
        matrix = torch.ones(size, size, device=device, dtype=DTYPES[dtype])
        multiply = functools.partial(torch.matmul, matrix, matrix)
        seconds = min(seconds_of(multiply) for _ in range(repeats))
        best = max(best, 2.0 * size**3 / seconds)
    return best


def operations(suite: AttentionSuite, variant: str, tokens: int) -> float | None:
    """Return the number of floating-point operations in matrix products; None for mixers without features.

    Softmax has two products, halved if causal. The linear form has the same two with one additional column for the
    denominator, and the products of queries and keys with the feature map's per-head matrices [H, F, D]. The backward
    pass counts as two forward passes.
    """
    sizes = suite.sizes
    size, passes = sizes.head_dim, 3.0 if suite.backward else 1.0
    rows = 2.0 * sizes.batch * sizes.heads * tokens * passes
    if variant == "softmax":
        return rows * 2 * size * tokens * (0.5 if suite.causal else 1.0)
    features, projected = getattr(suite, "features", None), 0
    if features is None:
        with torch.device("meta"):
            mixer = sizes.empty_mixer(causal=suite.causal)
        if mixer.info.feature_dim is None:
            return None
        features = mixer.info.feature_dim(mixer.config, size)
        matrices = [*mixer.parameters(), *mixer.buffers()]
        projected = sum(m.shape[1] for m in matrices if m.ndim == 3 and m.shape[2] == size)
        projected *= 2 if getattr(mixer.config, "tied", True) else 1
    return rows * (2 * features * (size + 1) + projected * size)


def with_bound(row: Row, suite: AttentionSuite, rate: float) -> Row:
    """Add each variant's operations, and its speed as a share of the machine's speed in matrix products."""
    figures = dict(row.figures)
    for variant in suite.variants:
        count = operations(suite, variant, row.tokens)
        figures[f"{variant}_operations"] = count
        figures[f"{variant}_share_of_bound"] = ratio(None if count is None else count / rate, row.seconds(variant))
    return replace(row, figures=figures)
