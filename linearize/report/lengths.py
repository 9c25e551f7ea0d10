"""The lengths at which a report measures time and memory."""

from __future__ import annotations

from collections.abc import Sequence

from linearize.errors import ConfigError

LENGTHS = (128, 512, 2048)


def check_lengths(lengths: Sequence[int], limit: int | None) -> tuple[list[int], list[str]]:
    """Leave out the lengths that a model cannot take.

    Returns:
        The others, ascending, and notes about what was left out.

    Raises:
        ConfigError: if a length is no length.
    """
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ConfigError(f"lengths: got {length!r}, expected numbers of tokens such as 128,512,2048")
    kept = sorted({length for length in lengths if limit is None or length <= limit})
    left = sorted({length for length in lengths if length not in kept})
    if not left:
        return kept, []
    names = ", ".join(f"{length:,}" for length in left)
    return kept, [f"Not timed at {names} tokens: this checkpoint takes at most {limit:,}; convert with --max-length."]
