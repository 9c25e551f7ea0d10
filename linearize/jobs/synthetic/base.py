"""The base class of the data sets that are generated here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field
from typing import Any, ClassVar

from linearize.core.options import check

Rows = Mapping[str, Iterable[Mapping[str, object]]]
"""Rows by the name of their split."""


class MadeSet:
    """A data set that is generated here; subclasses are dataclasses of its options.

    Attributes:
        called: its name in messages.
        reads: the kind of source it is made from; empty if it needs no source.
        framed: whether its tokenizer begins rows with a special token.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    called: ClassVar[str]
    reads: ClassVar[str] = ""
    framed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self, self.called)  # type: ignore[arg-type]

    def make(self, source: str | None = None) -> tuple[Rows, str]:
        """Return the rows and one line about them; `source` is a Hub name, file or folder."""
        raise NotImplementedError

    def vocabulary(self) -> Sequence[str]:
        """Return its tokens, which are separated by spaces in the texts; empty if any tokenizer will do."""
        return ()
