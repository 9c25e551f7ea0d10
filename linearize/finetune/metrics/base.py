"""What all metrics share: the features of their inputs, and no file on disk."""

from __future__ import annotations

from collections.abc import Sized
from typing import ClassVar

import datasets
import evaluate

CLASSES = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
NUMBERS = {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}


class PackageMetric(evaluate.Metric):
    """An `evaluate.Metric` whose inputs stay in memory; the class docstring is its description."""

    fields: ClassVar[dict[str, object]] = CLASSES
    source = ""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(keep_in_memory=True, **kwargs)

    def compute(
        self, *, predictions: Sized | None = None, references: Sized | None = None, **kwargs: object
    ) -> dict[str, float]:
        """See `evaluate.Metric.compute`; whole arrays are read as they stand, without a copy into a table.

        Raises:
            ValueError: if predictions and references are of different lengths.
        """
        if predictions is None or references is None or kwargs or self.writer is not None:
            return super().compute(predictions=predictions, references=references, **kwargs)
        if len(predictions) != len(references):
            raise ValueError(f"got {len(predictions)} predictions and {len(references)} references, expected as many")
        return self._compute(predictions, references)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__ or "",
            citation=self.source,
            inputs_description="predictions and references, of equal length",
            features=datasets.Features(self.fields),
        )
