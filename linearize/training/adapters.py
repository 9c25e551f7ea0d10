"""Low-rank updates through peft, added to a model in place and merged before it is saved.

By default they are added to the linear maps inside every attention, whatever their names.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.core.errors import ConfigError
from linearize.core.options import build, check, option, parse_pairs
from linearize.training.processes import is_main

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig
    from transformers import PreTrainedModel


PEFT = "base_model.model."
"""Prefix of the weights' names in peft's files."""
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank updates instead of full tuning; kernels and new heads are always tuned in full."""

    r: int = option(8, "rank of the updates", low=1)
    alpha: float = option(16.0, "their scale is alpha / r")
    dropout: float = option(0.0, "dropout of their input", low=0, below=1)
    targets: str | None = option(None, "endings of the modules' names, joined by +; by default those of the attention")

    def __post_init__(self) -> None:
        check(self, "lora")


def parse_lora(text: str) -> LoraConfig:
    """Read `r=8,alpha=16,dropout=0.05,targets=query+value`.

    Raises:
        ConfigError: for an unknown name, or a value that is not a number.
    """
    pairs = parse_pairs([piece.strip() for piece in text.split(",") if piece.strip()], "lora")
    values = {name: int(value) if value.isdecimal() else value for name, value in pairs.items()}
    return build(LoraConfig, values, "lora", "option")


def add_lora(model: PreTrainedModel, config: LoraConfig) -> None:
    """Add low-rank updates to a model, and train only them, the kernels and the head.

    Args:
        model: a softmax or converted model.
        config: rank, scale and targets.

    Raises:
        ConfigError: if no module fits the targets.
    """
    import peft
    from torch import nn

    from linearize.modeling.offload import as_if_in_memory

    targets = target_modules(model, config.targets)
    with as_if_in_memory(model):
        peft.inject_adapter_in_model(_peft_config(model, config, targets), model)
    body: Any = model.base_model
    # timm's models have their head inside, and of CLIP's image classifiers the body is the whole model.
    found = body.get_classifier() if hasattr(body, "get_classifier") else getattr(body, "classifier", ())
    heads = [found] if isinstance(found, nn.Module) else found
    # A language model's head may be tied to the embedding, which is in the body.
    frozen = set(body.parameters()).difference(*(head.parameters() for head in heads))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or ".linear_attention." in name or parameter not in frozen)


def _peft_config(model: PreTrainedModel, config: LoraConfig, targets: list[str], **more: Any) -> PeftConfig:
    """Return the options in peft's form."""
    import peft

    modules = [model.get_submodule(name) for name in targets]
    return peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=targets,
        fan_in_fan_out=any(type(getattr(module, "base_layer", module)).__name__ == "Conv1D" for module in modules),
        **more,
    )


def plain_name(name: str) -> str:
    """Return the name that a weight has without low-rank updates."""
    return name.replace(".base_layer.", ".")


def adapter_files(model: PreTrainedModel, config: LoraConfig, base: str) -> dict[str, bytes]:
    """Return the updates, before they are merged, as files for `peft.PeftModel.from_pretrained(base, folder)`.

    The files also hold the weights that were trained in full: kernels and head (peft's `modules_to_save`).

    Args:
        model: a model with the updates of `add_lora`.
        config: the options of `add_lora`.
        base: name of the model that the updates belong to.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from safetensors.torch import save

    from linearize.modeling.weights import stored

    targets = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    trained: dict[str, None] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" not in name:
            before, kernel, _ = name.partition(".linear_attention.")
            inside = name.startswith(f"{model.base_model_prefix}.")
            head = name.rpartition(".")[0] if inside else name.partition(".")[0]
            trained[f"{before}.linear_attention" if kernel else head] = None
    whole = list(trained)
    inside_whole = tuple(f"{module}." for module in whole)
    tensors = {name: x for name, x in model.state_dict().items() if ".lora_" in name or name.startswith(inside_whole)}
    peft_config = _peft_config(model, config, targets, modules_to_save=whole or None, base_model_name_or_path=base)
    with tempfile.TemporaryDirectory() as folder:
        peft_config.save_pretrained(folder)
        written = (Path(folder) / ADAPTER_CONFIG).read_bytes()
    # A tensor with two names is written twice: safetensors cannot share memory.
    apart = {name: stored(model, name, x).detach().cpu().clone().contiguous() for name, x in tensors.items()}
    plain = {f"{PEFT}{name.replace('.default.', '.')}": x for name, x in apart.items()}
    return {ADAPTER_CONFIG: written, "adapter_model.safetensors": save(plain, {"format": "pt"})}


def merge_lora(model: PreTrainedModel) -> PreTrainedModel:
    """Add the updates to the weights and remove their modules."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    from linearize.modeling.offload import put
    from linearize.modeling.weights import stored

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            updated: Any = module
            base = updated.get_base_layer()
            if not base.weight.is_meta:
                # Into new weights: a teacher may share the old ones.
                updated.merge(safe_merge=True)
            elif is_main():  # Only it has the updates of weights in files.
                weight = stored(model, own := f"{name}.base_layer.weight", base.weight)
                put(model, own, weight + updated.get_delta_weight("default").to(weight.dtype))
            model.set_submodule(name, base)
    if hasattr(model, "peft_config"):
        del model.peft_config
    return model.requires_grad_(True)


def target_modules(model: PreTrainedModel, endings: str | None = None) -> list[str]:
    """Return the names of the linear maps inside the attentions, or of the modules with the given endings.

    Raises:
        ConfigError: if the model has no such module.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from linearize.attention.interface import linear_attentions
    from linearize.conversion.attentions import trial_runs

    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    if endings is not None:
        wanted = tuple(part.strip() for part in endings.split("+"))
        targets = [name for name in linear if name.split(".")[-1] in wanted]
        if not targets:
            raise ConfigError(f"lora: no linear module is called {' or '.join(wanted)}; leave targets out to find them")
        return targets
    hosts = list(linear_attentions(model))
    if not hosts:
        # The attentions of a softmax model are found by a trial run.
        names = {id(module): name for name, module in model.named_modules()}
        hosts = [names[id(call.module)] for call in trial_runs(model)[1] if id(call.module) in names]
    inside = tuple(f"{host}." for host in hosts)
    targets = sorted(name for name in linear if name.startswith(inside) and ".linear_attention." not in name)
    if not targets:
        raise ConfigError(f"lora: {type(model).__name__} has no linear maps in its attentions; name targets=...")
    return targets
