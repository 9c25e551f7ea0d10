"""Honest selection: rows held out of the training rows, on which the state to keep is chosen.

The validation rows are reported, so nothing may be chosen on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from linearize.errors import DataError
from linearize.finetune.prepared import Row, Rows, RowSet, TaskData

SHARE, FEWEST, MOST, LARGEST_SHARE = 0.05, 32, 500, 0.2
"""Share of the training rows that is held out; no fewer than 32 of them, no more than 500, and never over a fifth."""
_STREAM = 0x5E1E
"""Keeps this choice apart from other random numbers of the same seed."""


class Chosen(RowSet):
    """Some rows of a data set.

    Args:
        rows: the data set.
        places: which of its rows, in order.
        still: whether what is random in a row (an image's crop, a masked model's masks) is turned off.
    """

    def __init__(self, rows: RowSet, places: Sequence[int], *, still: bool = False) -> None:
        self.rows, self.places, self.still = rows, [int(place) for place in places], still

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, place: int) -> Row:
        row = self.rows[self.places[place]]
        if not self.still:
            return row
        return {name: {"augment": False, "fixed": True}.get(name, value) for name, value in row.items()}


def selection_size(rows: int, asked: int | None = None) -> int:
    """Return how many of `rows` training rows are held out: as asked, or by `SHARE` and its bounds."""
    if asked is not None:
        return asked
    return max(1, min(MOST, max(round(SHARE * rows), min(FEWEST, int(LARGEST_SHARE * rows)))))


def hold_out(data: TaskData, rows: int | None = None, *, seed: int = 0) -> TaskData:
    """Hold rows out of the training rows: they become `data.selection`.

    The same seed holds out the same rows, for a teacher and for its student. Rows of one question stay together, and
    rows without a label that share a text with a held-out one are left out.

    Args:
        data: a task's rows. One that has a selection already is returned as it is.
        rows: how many; None: 5 % of the training rows, 32 to 500 of them, but never over a fifth; 0: none.
        seed: of the choice.

    Raises:
        DataError: if no row would be left to train on.
    """
    if data.selection is not None or rows == 0:
        return data
    total = len(data.train)
    count = selection_size(total, rows)
    if count >= total:
        raise DataError(
            f"{data.description}: got {total} rows to train on and {count} to choose the kept state on, expected more "
            "rows than that; lower selection_rows (0: choose on the validation rows)"
        )
    order = np.random.default_rng([seed, _STREAM]).permutation(total)
    held = {int(place) for place in order[:count]}
    owners = _owners(data.train)
    if owners is not None:
        questions = {owners[place] for place in held}
        held = {place for place in range(total) if owners[place] in questions}
    kept = [place for place in range(total) if place not in held]
    if not kept:
        raise DataError(f"{data.description}: all rows belong to one question; add rows, or set selection_rows to 0")
    extra = data.extra
    if extra is not None:
        extra = Rows([row for row in extra.rows if not held.intersection(row["sources"])])
    return replace(
        data, train=Chosen(data.train, kept), selection=Chosen(data.train, sorted(held), still=True), extra=extra
    )


def _owners(rows: RowSet) -> list[int] | None:
    """Which question a row belongs to, where long texts make several rows of one."""
    if not isinstance(rows, Rows) or not len(rows) or "owner" not in rows[0]:
        return None
    return [row["owner"] for row in rows.rows]
