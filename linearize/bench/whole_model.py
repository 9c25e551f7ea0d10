"""The forward of a whole model: softmax through SDPA, kernels, and no attention at all, which bounds the gain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from linearize.bench.models import BenchModel, values_only
from linearize.bench.rows import Row
from linearize.bench.suite import Suite
from linearize.bench.timing import Call


@dataclass(frozen=True)
class OfModel(Suite):
    """A suite of a whole model.

    Attributes:
        model: the model and its kernel; as plain data where it comes from another process.
    """

    model: BenchModel = field(default_factory=BenchModel)

    def __post_init__(self) -> None:
        if isinstance(self.model, dict):
            object.__setattr__(self, "model", BenchModel(**self.model))

    @property
    def device(self) -> str:
        """See `Suite`."""
        return self.model.device

    @property
    def dtype(self) -> str:
        """See `Suite`."""
        return self.model.dtype

    @property
    def note(self) -> str | None:
        """See `Suite`."""
        return self.model.note

    def check(self) -> None:
        """See `Suite`: a model that can be loaded, converted and made long enough."""
        _ = self.model.linear


@dataclass(frozen=True)
class ModelSuite(OfModel):
    """One forward of a model."""

    name: ClassVar[str] = "model"
    variants: ClassVar[tuple[str, ...]] = ("softmax", "linear", "no attention")

    @property
    def what(self) -> str:
        """See `Suite`."""
        return f"{self.model.label}, forward, {self.model.dtype}"

    def prepare(self, variant: str, tokens: int) -> Call:
        """See `Suite`."""
        if variant == "softmax":
            return self.model.softmax_forward(tokens)
        if variant == "linear":
            return self.model.linear_forward(tokens)
        return self.model.observed_forward(tokens, values_only)

    def figures(self, row: Row, rate: float) -> dict[str, float | None]:
        """See `Suite`: how much faster the model could get at most."""
        found = {"bound_speedup": row.times("softmax", over="no attention")}
        return found if self.model.image_size is None else found | {"image_size": float(self.model.image_size)}
