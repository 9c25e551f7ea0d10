"""Plans as YAML files that users edit (each layer's kernel, and why): write, read, apply to a model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from transformers import PreTrainedModel

from linearize.conversion.plan import replan
from linearize.core.errors import ConfigError
from linearize.core.options import build, read_values
from linearize.core.parsing import check_file, write_file
from linearize.core.registry import HYBRID, SCALES, Hybrid, Values
from linearize.modeling.plan import SOFTMAX, Plan

FORMAT = 1
HEAD = """\
# How each attention is converted. Edit kernels and arguments (`linearize kernels` lists them; softmax keeps a layer):
#   linearize convert MODEL --plan {name}
"""


@dataclass(frozen=True, kw_only=True)
class PlannedLayer(Hybrid):
    """One layer of a plan file, with its additions to the kernel.

    Attributes:
        layer: the layer's number.
        module: name of its attention module in the base model.
        kernel: the kernel's name, or "softmax".
        arguments: the kernel's own arguments.
        why: why the layer has this kernel.

    Raises:
        ConfigError: on construction, if the arguments are not names with values, or softmax has arguments.
    """

    layer: int
    module: str
    kernel: str
    arguments: dict[str, str | int | float | bool | None] | None = None
    why: str | None = None

    def __post_init__(self) -> None:
        if not all(isinstance(key, str) for key in self.arguments or ()):
            raise ConfigError("arguments: expected names with plain values")
        if self.kernel == SOFTMAX and self.all_arguments:
            raise ConfigError("the layer stays softmax, which takes no arguments")

    @property
    def all_arguments(self) -> Values:
        """The arguments, including the window and other additions."""
        additions = Hybrid(**{name: getattr(self, name) for name in HYBRID})
        values = {**(self.arguments or {}), **additions.changed}
        # A file lists all additions; `convert` would add scales to a window.
        return values if values.get("window") is None else {"scale": SCALES[0], **values}


@dataclass(frozen=True)
class PlanFile:
    """A plan file.

    Attributes:
        format: number of the file's format.
        architecture: class of the model that it was made for.
        model_type: that model's `model_type`.
        layers: the layers in order.

    Raises:
        ConfigError: on construction, for another format, or if a layer is missing or out of order.
    """

    format: int
    architecture: str
    model_type: str
    layers: tuple[PlannedLayer, ...]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigError(f"got format {self.format}, this version reads {FORMAT}")
        numbers = [one.layer for one in self.layers]
        if not numbers or numbers != list(range(len(numbers))):
            raise ConfigError(f"got layers {numbers}, expected all from 0 on, in their order")

    @property
    def why(self) -> dict[int, str]:
        """Why each layer has its kernel, by number, if the file gives a reason."""
        return {one.layer: one.why for one in self.layers if one.why}


def write_plan(path: str | os.PathLike[str], plan: Plan, why: Mapping[int, str] | None = None) -> None:
    """Write a plan to a temporary file, then rename it.

    Args:
        path: the file.
        plan: the plan; layers that can never be converted are left out.
        why: why each layer has its kernel, by number.

    Raises:
        ConfigError: if it cannot be written.
    """
    layers = [
        {
            "layer": layer.index,
            "module": layer.module,
            "kernel": layer.kernel,
            "arguments": dict(layer.arguments),
            "window": layer.hybrid.window,
            **layer.hybrid.changed,
            "why": (why or {}).get(layer.index, layer.reason),
        }
        for layer in plan.layers
        if layer.index is not None
    ]
    data = {"format": FORMAT, "architecture": plan.architecture, "model_type": plan.base_model_type, "layers": layers}
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=10_000)
    write_file(path, "plan", (HEAD.format(name=Path(path).name) + text).encode("utf-8"))


def check_plan_target(path: str, *, overwrite: bool) -> None:
    """Check, before anything slow, that a plan can be written to a file.

    Raises:
        ConfigError: if it is not a .yaml, its folder is missing, or it exists and is not a plan, or `overwrite` is
            false.
    """
    check_file(path, "--plan-out", (".yaml", ".yml"), overwrite=overwrite)
    if Path(path).exists():
        read_plan(path, "--plan-out")


def read_plan(path: str | os.PathLike[str], where: str = "--plan") -> PlanFile:
    """Read a plan file.

    Args:
        path: the file.
        where: the option that names it, for messages.

    Raises:
        ConfigError: if it cannot be read or is not a plan; the message names the mistake.
    """
    shown, expected = f"{where}: {os.fspath(path)!r}", "a file from --plan-out"
    data = read_values(Path(path), shown, expected)
    try:
        return build(PlanFile, data, "plan")
    except ConfigError as error:
        raise ConfigError(f"{shown} is not a plan ({error}); expected {expected}") from error


def apply_file(model: PreTrainedModel, base: Plan, file: PlanFile, max_length: int | None = None) -> Plan:
    """Return the plan of a file for a model.

    Args:
        model: the unconverted model.
        base: a plan for it that converts every layer that can be converted.
        file: the file.
        max_length: as in `linearize.plan`.

    Raises:
        ConfigError: if the file is for another model, keeps every layer, or a kernel or argument is wrong.
    """
    modules = [layer.module for layer in base.layers if layer.index is not None]
    theirs = [one.module for one in file.layers]
    if file.model_type != base.base_model_type or theirs != modules:
        here = f"{base.architecture} ({base.base_model_type}, {len(modules)} layers)"
        raise ConfigError(
            f"--plan: the file is for another model, {file.architecture} ({file.model_type}, {len(theirs)} layers), "
            f"not for this {here}; make one for it: linearize search MODEL --plan-out FILE.yaml"
        )
    if all(one.kernel == SOFTMAX for one in file.layers):
        raise ConfigError("--plan: the file keeps every layer softmax; give at least one a kernel")
    chosen = {one.layer: (one.kernel, one.all_arguments) for one in file.layers}
    made = replan(model, base, chosen, max_length=max_length)
    why = {one.module: one.why for one in file.layers if one.kernel == SOFTMAX and one.why}
    kept = (layer for layer in made.layers if layer.module in why)
    return made.with_layers(dataclasses.replace(layer, reason=why[layer.module]) for layer in kept)
