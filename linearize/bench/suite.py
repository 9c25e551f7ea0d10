"""What a suite is: something that can be done in several ways, at any length, and is to be measured."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from linearize.bench.rows import Row
from linearize.bench.timing import Call
from linearize.errors import ConfigError


@dataclass(frozen=True)
class Suite(abc.ABC):
    """Something that can be done in several ways, at any length. Its fields are plain data.

    Attributes:
        name: of the kind.
        variants: the ways.
        pair: the two of them that are compared: the reference, and ours.
        memory_variants: the ways whose memory is measured.
        may_run_out_of_memory: the ways that are tried in a process of their own in any case.
        calls: of one variant in a row, before it is the next one's turn.
        counts_prepared: whether memory counts what `prepare` makes (caches, states), and not only what a call needs.
    """

    name: ClassVar[str]
    variants: ClassVar[tuple[str, ...]] = ("softmax", "linear")
    pair: ClassVar[tuple[str, str]] = ("softmax", "linear")
    memory_variants: ClassVar[tuple[str, ...]] = ("softmax", "linear")
    may_run_out_of_memory: ClassVar[tuple[str, ...]] = ()
    calls: ClassVar[int] = 1
    counts_prepared: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def what(self) -> str:
        """Say what is measured, with all that tells it from another suite."""

    @property
    @abc.abstractmethod
    def device(self) -> str:
        """Where it runs."""

    @property
    @abc.abstractmethod
    def dtype(self) -> str:
        """Type of the numbers."""

    @property
    def note(self) -> str | None:
        """What a reader of its figures must know; None where there is nothing. After `check`."""
        return None

    @abc.abstractmethod
    def prepare(self, variant: str, tokens: int) -> Call:
        """Make the inputs and return the call."""

    @abc.abstractmethod
    def check(self) -> None:
        """Refuse what cannot be measured before anything is.

        Raises:
            LinearizeError: one of its children.
        """

    def figures(self, row: Row, rate: float) -> Mapping[str, float | None]:
        """Derive further figures of a row; `rate` is the machine's operations per second."""
        return {}


def check_lengths(lengths: Sequence[int]) -> list[int]:
    """Return lengths ascending, each once.

    Raises:
        ConfigError: if there is none, or one is no length.
    """
    bad = [n for n in lengths if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 1 << 24]
    if bad or not lengths:
        got = repr(bad[0]) if bad else "none"
        raise ConfigError(f"lengths: got {got}, expected numbers of tokens such as 512,4096,16384")
    return sorted(set(lengths))


def check_image_sizes(sizes: Sequence[int]) -> None:
    """Refuse sizes of pictures, in pixels, that are none.

    Raises:
        ConfigError: if there is none, or one is no size.
    """
    bad = [n for n in sizes if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 1 << 16]
    if bad or not sizes:
        raise ConfigError(f"image-size: got {bad[0] if bad else 'none'}, expected pixels such as 224,384,512")
