"""The sentence that opens a report: how close, how fast, up to what length; measured, or by the checkpoint's record."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from linearize.evaluation.report.predictions import SEVERAL

if TYPE_CHECKING:
    from linearize.evaluation.bench.rows import Row
    from linearize.evaluation.report.gather import Gathered

SAME = 0.05
"""Two forwards are equally fast if their times differ by at most this share."""


def answer(found: Gathered) -> str:
    """Return the sentence."""
    text = f"{_close(found)}; {_fast(found)}; {_length(found)}."
    return text[0].upper() + text[1:]


def _close(found: Gathered) -> str:
    parts = [part for part in (_score(found), _labels(found)) if part]
    if found.outputs is not None:
        whose = "its" if parts else "this model's"
        parts.append(f"{whose} outputs have a mean cosine of {found.outputs.cosine:.3f} to the original's")
    if parts:
        return " and ".join(parts)
    distance, error = found.fidelity.mean("total_variation"), found.fidelity.mean("output_error")
    how = (
        f"total variation {distance:.3f}, 0 is equal"
        if distance is not None
        else f"error of the heads' output {error:.3f}"
    )
    return f"this model's attention was compared with its own softmax only ({how})"


def _score(found: Gathered) -> str | None:
    """Say what stage two and the original reached, by the checkpoint's record."""
    tuned = found.info.provenance.finetuning
    if tuned is None or tuned.score is None:
        return None
    original = "" if tuned.original.score is None else f", the original {tuned.original.score:.3f}"
    chance = "" if tuned.chance is None else f", chance {tuned.chance:.3f}"
    return f"by its own record this model reaches {tuned.score:.3f} on {tuned.task}{original}{chance}"


def _labels(found: Gathered) -> str | None:
    changes = found.changes
    if changes is None:
        return None
    if changes.same is None:
        most = changes.largest[0].difference
        return f"its numbers differ from the original's by at most {most:.3g} on {changes.texts:,} texts"
    labels = "label" if changes.kind != SEVERAL else "labels"
    return f"it gives {changes.same:,} of {changes.texts:,} texts the same {labels} as the original"


def _fast(found: Gathered) -> str:
    timed = [(row, row.speedup) for row in found.speeds if row.speedup is not None]
    if not timed:
        return "how fast it is was not measured here"
    if found.noise is not None and found.noise.too_noisy:
        return "how fast it is cannot be said, as the machine was too noisy"
    row, speedup = timed[-1]
    if found.picture is not None:
        return f"one picture, {row.tokens:,} tokens, takes {1 / speedup:.2f} of the time that it takes with softmax"
    if _same(row, speedup):
        return f"one input of {row.tokens:,} tokens takes as long as with softmax"
    if speedup < 1:
        return f"one input of {row.tokens:,} tokens takes {1 / speedup:.2f} times as long as with softmax"
    slower = [other.tokens for other, times in timed if times <= 1 or _same(other, times)]
    short = f", one of {slower[-1]:,} is not faster" if slower else ""
    return f"one input of {row.tokens:,} tokens is read {speedup:.2f} times as fast as with softmax{short}"


def _same(row: Row, speedup: float) -> bool:
    """Tell whether both variants take equally long, within `SAME` or the spread of their turns."""
    spreads = [variant.timing.spread / 2 for variant in row.variants.values() if variant.timing is not None]
    return abs(math.log(speedup)) <= max(math.log1p(SAME), sum(spreads))


def _length(found: Gathered) -> str:
    if found.picture is not None:
        height, width = found.picture.shape[-2:]
        return f"it reads pictures of {height} x {width} pixels"
    takes = found.info.max_length
    reads = f"it takes up to {takes:,} tokens" if takes is not None else "no limit of its length is known"
    taught = found.info.provenance.row_length
    if taught is None:
        return f"{reads}, and the checkpoint does not say what lengths it was taught on"
    return f"{reads}, and it was taught on rows of up to {taught:,}"
