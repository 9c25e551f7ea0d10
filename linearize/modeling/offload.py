"""Models whose blocks stay in their weights files: accelerate's hooks read a module's weights for each of its calls."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from linearize.core.errors import UnsupportedModelError
from linearize.modeling.weights import BLOCKS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Temporarily hide what accelerate says about a model whose weights stay in their files."""
    logger = logging.getLogger("accelerate.big_modeling")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The following device_map keys do not match")
            yield
    finally:
        logger.setLevel(level)


def block_list(model: nn.Module, what: str) -> str:
    """Return the name of the list of a model's blocks: its largest outermost `ModuleList`.

    Args:
        model: the model, also without weights.
        what: what needs it, for the message.

    Raises:
        UnsupportedModelError: if the model is an encoder-decoder, or has no such list.
    """
    config = model.config
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{other}.") for other in found):
            found[name] = sum(parameter.numel() for parameter in module.parameters())
    if getattr(config, "is_encoder_decoder", False) or not found:
        kind = "an encoder and a decoder" if found else "no list of blocks"
        raise UnsupportedModelError(
            f"{what}: {type(model).__name__} has {kind}, expected one chain of blocks; leave it out"
        )
    return max(found, key=lambda name: found[name])


def device_map(model: PreTrainedModel, blocks: str, device: str) -> dict[str, str]:
    """Return which modules of a model stay in the weights files ("disk"): its blocks, and heads that are not tied.

    Args:
        model: the model, also without weights.
        blocks: name of the list of its blocks.
        device: the device of all other modules.
    """
    places: dict[str, str] = {}
    tied = tuple(getattr(model, "all_tied_weights_keys", None) or ())

    def put(module: nn.Module, path: str) -> None:
        for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            places[f"{path}{name}"] = device
        for name, child in module.named_children():
            full = f"{path}{name}"
            if f"{blocks}.".startswith(f"{full}.") and full != blocks:
                put(child, f"{full}.")
                continue
            head = model.base_model is not model and not full.startswith(f"{model.base_model_prefix}.")
            free = head and not any(key.startswith(f"{full}.") for key in tied)
            places[full] = "disk" if full == blocks or free else device

    put(model, "")
    return places


def size_of_block(model: nn.Module) -> int:
    """Return the bytes of the largest block of an offloaded model."""
    blocks = model.get_submodule(vars(model)[BLOCKS])
    return max(sum(parameter.nbytes for parameter in block.parameters()) for block in blocks.children())


@contextlib.contextmanager
def in_memory(module: nn.Module) -> Iterator[None]:
    """Keep the offloaded weights of a module on its device inside the block, instead of reading them for each call."""
    # Imported here, as a plain install has no accelerate.
    from accelerate.utils import align_module_device, has_offloaded_params

    with contextlib.ExitStack() as undo:
        for part in (part for part in module.modules() if has_offloaded_params(part)):
            hook: Any = part._hf_hook
            undo.enter_context(align_module_device(part))
            hook.offload = False
            undo.callback(setattr, hook, "offload", True)
        yield
    if any(parameter.device.type == "cuda" for parameter in module.parameters()):
        torch.cuda.empty_cache()
