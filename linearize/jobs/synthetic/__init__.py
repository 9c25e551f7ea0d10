"""Data made or reshaped here: ListOps, associative recall, bytes, pixels and Pathfinder as rows of text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = Mapping[str, Iterable[Mapping[str, object]]]
"""Rows by the name of their split."""


class MadeSet(ABC):
    """A data set that is made here; a subclass is a dataclass of its options.

    Attributes:
        reads: what it is made from; empty if it needs no source.
    """

    reads: ClassVar[str] = ""

    @abstractmethod
    def make(self, source: str | None = None) -> tuple[Rows, str]:
        """Return the rows and one line about them; `source` is a Hub name, file or folder."""

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer for its vocabulary; None if any tokenizer will do."""
        return None
