"""How long the rows were that a checkpoint was taught on, as its own record says."""

from __future__ import annotations

from collections.abc import Mapping

from linearize.checkpoint.chosen import mapping


def taught_length(provenance: Mapping[str, object]) -> int | None:
    """Return the tokens of the longest row of the last stage; None where the record says nothing of it."""
    before, tuned = _stages(provenance)
    return before if tuned is None else tuned


def longest_taught(provenance: Mapping[str, object]) -> int | None:
    """Return the tokens of the longest row of any stage; None where the record says nothing of it."""
    return max((length for length in _stages(provenance) if length is not None), default=None)


def _stages(provenance: Mapping[str, object]) -> tuple[int | None, int | None]:
    """Return the longest row of stage one and the alignment, and that of stage two, after it was cut."""
    tuned = mapping(provenance.get("finetuning"))
    of_task = [_tokens(mapping(tuned.get("facts")).get("longest_row")), _tokens(tuned.get("max_length"))]
    cut = min((length for length in of_task if length is not None), default=None)
    return _tokens(provenance.get("longest_row")), cut


def _tokens(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
