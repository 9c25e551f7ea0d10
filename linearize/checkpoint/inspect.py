"""Facts about a checkpoint from its config and the header of its weights file, without reading weights."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from linearize.checkpoint.loading import read_config
from linearize.checkpoint.provenance import Provenance
from linearize.conversion.gguf import count_parameters, located
from linearize.conversion.positions import current_length
from linearize.core.errors import CheckpointError, LinearizeError, first_line
from linearize.core.registry import ReadOnlyValues
from linearize.modeling.config import MODEL_TYPE, PACKAGES, LinearizeConfig
from linearize.modeling.model import check_checkpoint, kernel_parameters, saved_class
from linearize.modeling.plan import Plan
from linearize.modeling.weights import read_header


@dataclass(frozen=True)
class CheckpointInfo:
    """Facts about a checkpoint, converted or not.

    Attributes:
        name: name of the checkpoint, as given.
        converted: whether it has linear attention.
        base_model: name of the original, if the checkpoint records it.
        model_type: the original's model type.
        architecture: name of the saved class.
        plan: the kernel of every attention; None if the checkpoint is not converted.
        parameters_added: number of learnable parameters in the kernels.
        parameters_total: number of parameters in the weights file; None if that is not in safetensors.
        max_length: tokens that the model takes; None if unlimited or unknown.
        format_version: format version of a converted checkpoint.
        provenance: the record of how it was made.
        packages: packages that register kernels from outside linearize, by kernel; loading needs them.
    """

    name: str
    converted: bool
    base_model: str | None
    model_type: str
    architecture: str | None
    plan: Plan | None = None
    parameters_added: int = 0
    parameters_total: int | None = None
    max_length: int | None = None
    format_version: int | None = None
    provenance: Provenance = field(default_factory=Provenance)
    packages: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, str]]:
        """Return label and value of each fact, ready to print."""
        converted = "no: this is an ordinary model with softmax attention"
        if self.plan is not None:
            kernels = Counter(layer.kernel for layer in self.plan.layers)
            converted = "yes: " + ", ".join(f"{count} x {name}" for name, count in sorted(kernels.items()))
        rows = [
            ("checkpoint", self.name),
            ("converted", converted),
            ("made from", self.base_model or None),
            ("model type", self.model_type),
            ("architecture", self.architecture or "not recorded"),
            ("parameters", None if self.parameters_total is None else f"{self.parameters_total:,}"),
            ("added by kernels", f"{self.parameters_added:,}" if self.converted else None),
            ("longest input", "not limited or not known" if self.max_length is None else f"{self.max_length:,}"),
            ("format version", None if self.format_version is None else str(self.format_version)),
            *(("needs package", f"{package} (kernel {kernel})") for kernel, package in self.packages.items()),
        ]
        known = [(label, value) for label, value in rows if value is not None]
        return known + self.provenance.choice_rows() + self.provenance.training_rows()


def inspect_checkpoint(name: str | os.PathLike[str]) -> CheckpointInfo:
    """Return facts about a checkpoint, and check that its files belong together; no weight is read into memory.

    Args:
        name: folder, GGUF file, or name on the Hub.

    Raises:
        CheckpointError: if there is no checkpoint of that name, or it is damaged.
        ConfigError: if it uses an unknown kernel; the message names the package that registers it, if recorded.
    """
    values = read_config(str(name))
    total = count_parameters(name)
    if total is None and (header := read_header(name)) is not None:
        total = sum(prod(shape) for shape, _ in header.values())
    converted = values.get("model_type") == MODEL_TYPE
    section: ReadOnlyValues = {}
    make: Callable[[PreTrainedConfig], nn.Module] | None = AutoModel.from_config
    if converted:
        check_checkpoint(name)
        config: PreTrainedConfig = LinearizeConfig.from_dict(values)
        section, make = config.linearize, saved_class(config)
    else:
        try:
            place, where = located(str(name))
            config = AutoConfig.from_pretrained(place, trust_remote_code=False, **where)
        except Exception as error:
            why = f"config.json describes no known model ({first_line(error)})"
            raise CheckpointError(f"{str(name)!r}: {why}") from None
    provenance, length = Provenance(section.get("provenance")), None
    model: nn.Module | None = None
    try:
        if make is not None:
            # On this device, weights take no memory.
            with torch.device("meta"):
                model = make(config)
            length = current_length(model)
    except Exception as error:
        # Facts that cannot be determined are left out.
        if model is None and isinstance(error, LinearizeError):
            raise
    return CheckpointInfo(
        name=str(name),
        converted=converted,
        base_model=provenance.text("base_model"),
        model_type=section.get("base_model_type", config.model_type),
        architecture=(values.get("architectures") or [None])[0],
        plan=Plan.from_dict(section) if converted else None,
        parameters_added=sum(p.numel() for p in kernel_parameters(model)) if converted and model is not None else 0,
        parameters_total=total,
        max_length=length,
        format_version=section.get("format_version"),
        provenance=provenance,
        packages=section.get(PACKAGES, {}),
    )
