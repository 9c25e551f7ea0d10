"""Classification of images."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from linearize.checkpoint.fingerprint import data_digest, spread
from linearize.core.heads import HEADS
from linearize.data.encode import ImageEncoder
from linearize.training.stage_two.rows import Row, stable_seed
from linearize.training.stage_two.splits import Given, View, open_splits
from linearize.training.stage_two.task_types.base import ClassLabels, TaskData

DIGESTS = 512
SHIFT = 1 / 8
"""Largest shift of an augmented image, relative to its size: 4 pixels of 32."""


class ImageRows:
    """Images that are read one by one; `augment` says whether the collator may change them."""

    def __init__(self, view: View, augment: bool) -> None:
        self.view, self.augment = view, augment

    def __len__(self) -> int:
        return len(self.view)

    def digest(self) -> str:
        """Return a hash of the sizes of all files, and the contents and classes of up to `DIGESTS`."""
        some = self.view.fetch(spread(len(self.view), DIGESTS))
        return data_digest([self.view.records.sizes[self.view.rows], some, self.augment])

    def __getitem__(self, place: int) -> Row:
        return {"example": self.view.fetch([place])[0], "place": place, "augment": self.augment}


class ImageClassification(ClassLabels):
    """Images that each have a class."""

    head = HEADS["image-classification"]

    @functools.cached_property
    def encoder(self) -> ImageEncoder:
        """The function from images to pixels."""
        return ImageEncoder(self.processor)

    def prepare(self, given: Given) -> TaskData:
        """Read images and classes.

        Raises:
            DataError: if the images or their classes cannot be read.
        """
        splits = open_splits(self.task, given, self.options)
        if (reader := self.fitted(splits.train)) is not self:
            return reader.prepare(given)
        self.read_labels(splits.train)
        train, validation = ImageRows(splits.train, self.options.augment), ImageRows(splits.validation, False)
        return TaskData(self, train, validation, splits.description)

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return pixels [B, C, H, W], shifted and mirrored if the rows are augmented, and labels [B]."""
        examples = [row["example"] for row in rows]
        pixels = self.encoder(examples, slice(None))["pixel_values"]
        if rows[0]["augment"]:
            pixels = shifted(pixels, stable_seed(self.options.seed, [row["place"] for row in rows], self.epoch))
        return {"pixel_values": pixels, "labels": self.label_tensor(self.numbered(examples))}


def shifted(pixels: Tensor, seed: int) -> Tensor:
    """Return images [B, C, H, W] shifted by up to `SHIFT` of their size, edges repeated, and half of them mirrored."""
    chance = np.random.default_rng(seed)
    most = max(1, round(pixels.shape[-1] * SHIFT))
    wide = torch.nn.functional.pad(pixels, (most,) * 4, mode="replicate")
    moved = torch.empty_like(pixels)
    for place, (down, right) in enumerate(chance.integers(0, 2 * most + 1, size=(len(pixels), 2))):
        crop = wide[place, :, down : down + pixels.shape[2], right : right + pixels.shape[3]]
        moved[place] = crop.flip(-1) if chance.random() < 0.5 else crop
    return moved
