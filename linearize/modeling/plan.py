"""What a conversion did to each attention of a model, as data: shown before it is done, saved in the checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from linearize.attention.mixer import HeadShape
from linearize.errors import CheckpointError, ConfigError
from linearize.registry import kernel_info

SOFTMAX = "softmax"
"""The kernel name of a layer that stays as it is."""


@dataclass(frozen=True)
class LayerPlan:
    """One attention.

    Attributes:
        module: dotted name, from the base model (without the head).
        index: number among the self-attentions that can be converted, in the order in which they run; None for others.
        kernel: the kernel's name, or "softmax" where the layer stays.
        shape: sizes and direction.
        arguments: the kernel's arguments that differ from its defaults, and those in `KernelInfo.unsaid`.
        reason: why the layer stays.
        cache_index: the host's `layer_idx`, None where it has none.
        window: W of the softmax window joined to the kernel, or None.
    """

    module: str
    index: int | None
    kernel: str
    shape: HeadShape
    arguments: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    cache_index: int | None = None
    window: int | None = None

    @property
    def converted(self) -> bool:
        """Whether the layer gets a kernel."""
        return self.kernel != SOFTMAX


@dataclass(frozen=True)
class Plan:
    """All attentions of a model.

    Attributes:
        architecture: class name of the model it was made for.
        base_model_type: `model_type` of its config.
        layers: in the order in which they run.
        seed: from which the kernels' starting values are drawn (layer i: seed + i).
    """

    architecture: str
    base_model_type: str
    layers: tuple[LayerPlan, ...]
    seed: int = 0

    @property
    def converted(self) -> tuple[LayerPlan, ...]:
        """The layers that get a kernel."""
        return tuple(layer for layer in self.layers if layer.converted)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for config.json."""
        return {
            "base_model_type": self.base_model_type,
            "base_architecture": self.architecture,
            "seed": self.seed,
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Read what `to_dict` wrote.

        Raises:
            CheckpointError: if something is missing or of the wrong kind.
        """
        try:
            layers = tuple(_layer_from_dict(layer) for layer in data["layers"])
            plan = cls(str(data["base_architecture"]), str(data["base_model_type"]), layers, int(data["seed"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(
                f"config.json: the 'linearize' section cannot be read ({type(error).__name__}: {error}); "
                "the file is damaged or was edited: convert the model again"
            ) from None
        return plan


def _layer_from_dict(data: Mapping[str, Any]) -> LayerPlan:
    known = {f.name for f in dataclasses.fields(LayerPlan)}
    extra = set(data) - known
    if extra:
        raise ValueError(f"unknown keys {sorted(extra)} in a layer")
    values = dict(data)
    values["shape"] = HeadShape(**values["shape"])
    if not isinstance(values["module"], str) or not isinstance(values["kernel"], str):
        raise TypeError("module and kernel of a layer are names")
    window = values.get("window")
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"window of a layer: got {window!r}, expected a whole number of tokens or null")
    if not isinstance(values.get("arguments", {}), dict):
        raise TypeError("arguments of a layer are a mapping")
    if values["kernel"] != SOFTMAX:
        values["arguments"] = _unsaid(values["kernel"]) | values.get("arguments", {})
    return LayerPlan(**values)


def _unsaid(kernel: str) -> dict[str, Any]:
    """Return what a plan means by arguments that it does not mention."""
    try:
        return dict(kernel_info(kernel).unsaid)
    except ConfigError:
        # Said, in one place for all mistakes, where the kernel is built.
        return {}
