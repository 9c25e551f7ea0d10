"""Find the text, image and label columns of a table, and give them the same names in every table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from linearize.core.errors import DataError
from linearize.core.heads import Modality
from linearize.data.config import DataConfig

if TYPE_CHECKING:
    from datasets import Dataset

TEXT_NAMES = ("text", "sentence", "content", "document", "article", "review", "body", "tokens", "words")
PAIRS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("text1", "text2"),
    ("question", "sentence"),
    ("question", "context"),
)
"""Columns that are read as the two texts of a pair unless columns are named."""
# `datasets` also makes images from paths and bytes.
KINDS = {
    "text": ("text", "words"),
    "pair": ("text", "words"),
    "image": ("binary", "image", "text"),
    "label": ("class", "number", "text", "classes", "numbers", "words"),
}
"""What a column may hold, by its purpose."""
LISTS = {"class": "classes", "number": "numbers", "text": "words"}
"""What a column of lists holds, by what is in the lists."""


def uniform(table: Dataset, config: DataConfig, modality: Modality, origin: str, label: str | None = None) -> Dataset:
    """Return a table with only the wanted columns, named ``text`` and ``pair``, or ``image``; and ``label``.

    Args:
        table: A data set.
        config: Names of the columns, or None to find them.
        modality: Whether the model reads text or images.
        origin: Name of the data set in messages.
        label: Column of the label; None if rows have no labels.

    Returns:
        The table with at most three columns; images are not decoded.

    Raises:
        DataError: If a column is missing, cannot be found, or holds something else.
    """
    from datasets import Features, Image, Value

    kinds = column_kinds(table)
    if not kinds or not len(table):
        raise DataError(f"{origin} is empty: got no rows, expected at least one; check the file or the split.")
    names = {"label": label}
    if modality == "text":
        texts = {name: "text" if kind == "words" else kind for name, kind in kinds.items() if name != label}
        pair = find_pair(kinds) if config.finds_pairs else None
        first, second = pair or (None, config.text_pair_column)
        names["text"] = first or find_column(texts, config.text_column, "text", origin)
        names["pair"] = second
    else:
        names["image"] = find_column(kinds, config.image_column, "image", origin)
    asked = {role: name for role, name in names.items() if name is not None}
    for role, name in asked.items():
        if name not in kinds:
            other = "; name another with --label-column" if role == "label" else ""
            raise DataError(f"{origin}: got no column {name!r}, expected one of: {listed(kinds)}{other}.")
        if kinds[name] not in KINDS[role]:
            raise DataError(
                f"{origin}: got {kinds[name]} in column {name!r}, expected {' or '.join(KINDS[role])}; "
                f"its columns are: {listed(kinds)}."
            )
    if len(set(asked.values())) < len(asked):
        raise DataError(f"{origin}: got the same column for two purposes, expected different ones: {names}.")
    renamed = {name: role for role, name in asked.items() if name != role}
    table = table.select_columns(list(asked.values())).rename_columns(renamed)
    for role, name in asked.items():
        if kinds[name] == "words" and role != "label":
            text = Features(table.features | {role: Value("string")})
            table = table.map(_joined, input_columns=role, fn_kwargs={"role": role}, features=text)
    return table.cast_column("image", Image(decode=False)) if modality == "image" else table


def _joined(words: list[str | None] | None, role: str) -> dict[str, str]:
    return {role: " ".join(filter(None, words or ()))}


def column_kinds(table: Dataset) -> dict[str, str]:
    """Name what each column holds: ``text``, ``image``, ``number``, ``class``, a value of `LISTS`, or its type."""
    return {name: _feature_kind(feature) for name, feature in table.features.items()}


def find_column(kinds: dict[str, str], asked: str | None, kind: Modality, origin: str) -> str:
    """Return the column that was asked for; by default the one with a usual name, or the only one of its kind.

    Raises:
        DataError: If no column fits, or more than one; the message lists all columns.
    """
    if asked is not None:
        return asked
    fitting = [name for name, has in kinds.items() if has == kind]
    usual = [name for name in TEXT_NAMES if name in fitting]
    if kind == "text" and usual:
        return usual[0]
    if len(fitting) == 1:
        return fitting[0]
    raise DataError(
        f"{origin}: got {len(fitting)} columns that may be the {kind}, expected one; "
        f"set {kind}_column (of a task: columns) to one of its columns: {listed(kinds)}."
    )


def find_pair(kinds: dict[str, str]) -> tuple[str, str] | None:
    """Return the two columns of a pair if they have usual names and no other column has a usual text name."""
    texts = {name for name, kind in kinds.items() if kind == "text"}
    for pair in PAIRS:
        if texts.issuperset(pair) and texts.intersection(TEXT_NAMES) <= set(pair):
            return pair
    return None


def listed(kinds: dict[str, str]) -> str:
    """List the columns and what they hold, for a message."""
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items())


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of classes in their order: the alphabet's, or, if all are whole numbers, that of the numbers."""
    ordered = sorted(set(names))
    return tuple(sorted(ordered, key=int) if all(name.isdecimal() for name in ordered) else ordered)


def _feature_kind(feature: object) -> str:
    from datasets import ClassLabel, Image, LargeList, List, Value

    if isinstance(feature, ClassLabel):
        return "class"
    if isinstance(feature, List | LargeList) and (kind := LISTS.get(_feature_kind(feature.feature))) is not None:
        return kind
    if isinstance(feature, Image) or (isinstance(feature, dict) and "bytes" in feature):
        return "image"
    if not isinstance(feature, Value):
        return type(feature).__name__.lower()
    if feature.dtype in ("string", "large_string"):
        return "text"
    numeric = feature.dtype.startswith(("bool", "int", "uint", "float"))
    return "number" if numeric else feature.dtype.removeprefix("large_")
