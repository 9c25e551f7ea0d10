"""What all metrics share: the features of their inputs, and no file on disk."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import datasets
import evaluate

CLASSES = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
NUMBERS = {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}


class PackageMetric(evaluate.Metric):
    """An `evaluate.Metric` whose inputs stay in memory; the class docstring is its description."""

    fields: ClassVar[dict[str, Any]] = CLASSES
    source = ""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(keep_in_memory=True, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__ or "",
            citation=self.source,
            inputs_description="predictions and references, of equal length",
            features=datasets.Features(self.fields),
        )


def without_warnings(compute: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    """Keep warnings of edge cases (one class, constant numbers) off the screen: what they give is documented."""

    @functools.wraps(compute)
    def quiet(*args: Any, **kwargs: Any) -> dict[str, float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compute(*args, **kwargs)

    return quiet
