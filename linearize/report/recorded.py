"""The data that a checkpoint was taught on, as its own record names it: found again where that can be done.

A record comes from whoever made the checkpoint. Of files on this machine it may name only what lies in the current
folder or beside the checkpoint: a name with a folder in it is taken for one on the Hub, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from linearize.checkpoint.chosen import mapping
from linearize.data.local import looks_local
from linearize.options import on_disk

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
"""Name of a data set on the Hub, with its owner and configuration: a bare name may have been that of a folder."""


@dataclass(frozen=True)
class RecordedData:
    """Data that a checkpoint names.

    Attributes:
        stage: which stage read it.
        names: of the data sets, with their weights; a name on the Hub, or a path here.
        missing: the first name that is not to be found here; None where all may be.
        text_column: of the text, or two with a comma.
        image_column: of the image.
        task: the record of stage two, for its rows; empty for the other stages.
    """

    stage: str
    names: tuple[tuple[str, float], ...]
    missing: str | None
    text_column: str | None = None
    image_column: str | None = None
    task: Mapping[str, object] | None = None


def recorded_data(provenance: Mapping[str, object], checkpoint: str) -> RecordedData | None:
    """Return the data of the last stage that names some; None where none does, as with the built-in data.

    Args:
        provenance: what the checkpoint says of how it was made.
        checkpoint: its folder or Hub name.
    """
    tuned = mapping(provenance.get("finetuning"))
    name = str(tuned.get("data") or "").partition(": ")[0]
    if name and name != "tables":
        found, missing = _find({name: 1.0}, checkpoint)
        return RecordedData("stage two", found, missing, task=tuned)
    for stage, options in _stages(provenance):
        named = options.get("dataset")
        weights = named if isinstance(named, dict) else {named: 1.0} if isinstance(named, str) and named else {}
        if weights and all(_weight(value) for value in weights.values()):
            found, missing = _find(weights, checkpoint)
            columns = [options.get(column) for column in ("text_column", "image_column")]
            text, image = (column if isinstance(column, str) and column else None for column in columns)
            return RecordedData(stage, found, missing, text, image)
    return None


def _stages(provenance: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Give the options of the stages that say some, the last stage first; those of a conversion are its own."""
    for stage, name in (("alignment", "alignment"), ("stage one", "distillation")):
        yield stage, mapping(mapping(provenance.get(name)).get("options"))
    yield "stage one", mapping(provenance.get("options"))


def _find(weights: Mapping[str, float], checkpoint: str) -> tuple[tuple[tuple[str, float], ...], str | None]:
    found = [(_place(str(name), checkpoint), name, weight) for name, weight in weights.items()]
    missing = next((str(name) for place, name, _ in found if place is None), None)
    return tuple((place or str(name), float(weight)) for place, name, weight in found), missing


def _place(name: str, checkpoint: str) -> str | None:
    """Return where a data set of this name is: a path here, or its name on the Hub; None where it can be neither."""
    if Path(name).name == name and name not in (".", ".."):
        for folder in (Path(), Path(checkpoint).absolute().parent):
            if on_disk(str(folder / name)):
                return str(folder / name)
    on_hub = HUB_NAME.fullmatch(name) is not None and not looks_local(name) and not on_disk(name)
    return name if on_hub else None


def _weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
