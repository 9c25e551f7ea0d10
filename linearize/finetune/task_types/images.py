"""Classification of images."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from linearize.checkpoint.fingerprint import data_digest, spread
from linearize.data.encode import ImageEncoder
from linearize.finetune.prepared import DataOptions, Row, RowSet, TaskData, stable_seed
from linearize.finetune.tables import Given, View, open_splits
from linearize.finetune.task import Task
from linearize.finetune.task_types.text import label_names, metrics_of, numbered

if TYPE_CHECKING:
    from linearize.types import Processor

DIGESTS = 512
SHIFT = 1 / 8
"""Furthest shift of an augmented image, of its size: 4 pixels of 32."""


class ImageRows(RowSet):
    """Images read when they are wanted.

    Args:
        view: the records.
        augment: whether the collator may change them.
    """

    def __init__(self, view: View, augment: bool) -> None:
        self.view, self.augment = view, augment

    def __len__(self) -> int:
        return len(self.view)

    def digest(self) -> str:
        """Identify the images: the sizes of all files, the contents and classes of up to `DIGESTS`."""
        some = self.view.fetch(spread(len(self.view), DIGESTS))
        return data_digest([self.view.records.sizes[self.view.rows], some, self.augment])

    def __getitem__(self, place: int) -> Row:
        return {"example": self.view.fetch([place])[0], "place": place, "augment": self.augment}


def prepare(task: Task, given: Given, processor: Processor, options: DataOptions) -> TaskData:
    """Read images and classes.

    Raises:
        DataError: if the images or their classes cannot be read.
    """
    splits = open_splits(task, given, limit=options.limit, seed=options.seed, most=options.validation_limit)
    task = dataclasses.replace(task, labels=label_names(task, splits.train))
    encoder = ImageEncoder(processor, None)

    def collate(rows: list[Row]) -> dict[str, Tensor]:
        examples = [row["example"] for row in rows]
        pixels = encoder([example._replace(label=None) for example in examples], slice(None))["pixel_values"]
        if rows[0]["augment"]:
            pixels = shifted(pixels, stable_seed(options.seed, [row["place"] for row in rows]))
        return {"pixel_values": pixels, "labels": torch.tensor(numbered(task, examples))}

    return TaskData(
        task,
        ImageRows(splits.train, options.augment),
        ImageRows(splits.validation, False),
        collate,
        metrics_of(task),
        splits.description,
    )


def shifted(pixels: Tensor, seed: int) -> Tensor:
    """Shift images [B, C, H, W] by up to `SHIFT` of their size, edges repeated, and mirror half of them."""
    chance = np.random.default_rng(seed)
    most = max(1, round(pixels.shape[-1] * SHIFT))
    wide = torch.nn.functional.pad(pixels, (most,) * 4, mode="replicate")
    made = torch.empty_like(pixels)
    for place, (down, right) in enumerate(chance.integers(0, 2 * most + 1, size=(len(pixels), 2))):
        crop = wide[place, :, down : down + pixels.shape[2], right : right + pixels.shape[3]]
        made[place] = crop.flip(-1) if chance.random() < 0.5 else crop
    return made
