"""The sentence that a report opens with: how close, how fast, at what length; of what was measured or is on record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from linearize.checkpoint.taught import taught_length
from linearize.report.predictions import SEVERAL

if TYPE_CHECKING:
    from linearize.bench.rows import Row
    from linearize.report.gather import Gathered

SAME = 0.05
"""Share of softmax's time within which one forward is as fast as the other."""


def answer(found: Gathered) -> str:
    """Return the sentence."""
    text = f"{_close(found)}; {_fast(found)}; {_length(found)}."
    return text[0].upper() + text[1:]


def _close(found: Gathered) -> str:
    parts = [part for part in (_score(found.info.provenance), _labels(found)) if part]
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


def _score(provenance: Mapping[str, object]) -> str | None:
    """Say what stage two reached, and the original, by the checkpoint's own record."""
    tuned = provenance.get("finetuning")
    if not isinstance(tuned, dict) or not _number(tuned.get("score")):
        return None
    original = tuned.get("original")
    theirs = original.get("score") if isinstance(original, dict) else None
    beside = f", the original {theirs:.3f}" if _number(theirs) else ""
    level = f", chance {tuned['chance']:.3f}" if _number(tuned.get("chance")) else ""
    return f"by its own record this model reaches {tuned['score']:.3f} on {tuned.get('task')}{beside}{level}"


def _labels(found: Gathered) -> str | None:
    changes = found.changes
    if changes is None:
        return None
    if changes.same is None:
        most = changes.largest[0].difference
        return f"its numbers differ from the original's by at most {most:.3g} on {changes.texts:,} texts"
    what = "label" if changes.kind != SEVERAL else "labels"
    return f"it gives {changes.same:,} of {changes.texts:,} texts the same {what} as the original"


def _fast(found: Gathered) -> str:
    known = [row for row in found.speeds if row.speedup is not None]
    if not known:
        return "how fast it is was not measured here"
    if found.noise is not None and found.noise.too_noisy:
        return "how fast it is cannot be said, as the machine was too noisy"
    row = known[-1]
    assert row.speedup is not None
    times = row.speedup
    if found.picture is not None:
        return f"one picture, {row.tokens:,} tokens, takes {1 / times:.2f} of the time that it takes with softmax"
    if _same(row):
        return f"one input of {row.tokens:,} tokens takes as long as with softmax"
    if times < 1:
        return f"one input of {row.tokens:,} tokens takes {1 / times:.2f} times as long as with softmax"
    slower = [other.tokens for other in known if (other.speedup or 0) <= 1 or _same(other)]
    since = f", one of {slower[-1]:,} is not faster" if slower else ""
    return f"one input of {row.tokens:,} tokens is read {times:.2f} times as fast as with softmax{since}"


def _same(row: Row) -> bool:
    """Tell whether both variants take as long, within `SAME` or the spread of their turns."""
    assert row.speedup is not None
    spreads = [one.timing.spread / 2 for one in row.variants.values() if one.timing is not None]
    return abs(math.log(row.speedup)) <= max(math.log1p(SAME), sum(spreads))


def _length(found: Gathered) -> str:
    if found.picture is not None:
        height, width = found.picture.shape[-2:]
        return f"it reads pictures of {height} x {width} pixels"
    takes = found.info.max_length
    reads = f"it takes up to {takes:,} tokens" if takes is not None else "no limit of its length is known"
    taught = taught_length(found.info.provenance)
    if taught is None:
        return f"{reads}, and the checkpoint does not say what lengths it was taught on"
    return f"{reads}, and it was taught on rows of up to {taught:,}"


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
