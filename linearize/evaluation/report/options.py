"""Options of a report and of a comparison; importing this loads nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from linearize.core.options import check, option, parse_lengths, section
from linearize.evaluation.bench.options import check_lengths

LENGTHS = (128, 512, 2048)


@dataclass(frozen=True)
class InputOptions:
    """Which inputs to measure on."""

    dataset: str | None = option(
        None,
        "Hub data set, local file or folder to take the inputs from",
        metavar="NAME_OR_PATH",
        shown="the built-in data",
    )
    text_column: str | None = option(
        None, "column of the text, or the two of a pair; found automatically where it is clear", metavar="C[,D]"
    )
    image_column: str | None = option(None, "column of the image", metavar="C")
    inputs: int = option(8, "how many inputs to measure on", low=1)
    max_length: int | None = option(None, "tokens per input", low=1, shown="128")

    def __post_init__(self) -> None:
        check(self, "report")


def _original() -> Any:
    return option(
        None,
        "the model it was made from, to compare whole outputs with; by default the one that the checkpoint records",
        metavar="MODEL",
    )


def _lengths() -> Any:
    return option(
        LENGTHS,
        "tokens to time at; none: no timing",
        shown=",".join(map(str, LENGTHS)),
        metavar="N,N",
        parse=parse_lengths,
    )


@dataclass(frozen=True)
class ReportOptions:
    """Options of a report."""

    checkpoint: str = option(help="folder or Hub name of a converted checkpoint", positional=True, metavar="DIR")
    original: str | None = _original()
    inputs: InputOptions = section(InputOptions, shown={"max_length": "the length it was trained on, 512 at most"})
    lengths: Sequence[int] = _lengths()
    device: str = option("auto", "cpu, cuda, cuda:1, mps or auto", metavar="D")

    def __post_init__(self) -> None:
        if self.lengths:
            check_lengths(self.lengths)


@dataclass(frozen=True)
class CompareOptions:
    """Options of a comparison."""

    checkpoints: Sequence[str] = option(
        help="folders of converted checkpoints, two or more", positional=True, nargs="+", metavar="DIR"
    )
    original: str | None = _original()
    inputs: InputOptions = section(InputOptions)
    lengths: Sequence[int] = _lengths()
    device: str = option("auto", "cpu, cuda, cuda:1, mps or auto", metavar="D")
    repeats: int = option(5, "how often each is timed; differences within the quartiles are noise", low=1)

    def __post_init__(self) -> None:
        if self.lengths:
            check_lengths(self.lengths)


def lengths_within(limit: int | None, lengths: Sequence[int], notes: list[str]) -> list[int]:
    """Return the lengths that a model can take, ascending; a note says which ones it cannot."""
    dropped = [length for length in sorted(set(lengths)) if limit is not None and length > limit]
    if dropped:
        names = ", ".join(f"{length:,}" for length in dropped)
        notes.append(
            f"Not timed at {names} tokens: this checkpoint takes at most {limit:,}; convert with --max-length."
        )
    return sorted(set(lengths) - set(dropped))
