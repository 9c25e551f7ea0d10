"""Models whose blocks stay in their weights files: accelerate's hooks read a module's weights for each of its calls."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from linearize.attention.interface import linear_attentions
from linearize.core.errors import UnsupportedModelError
from linearize.modeling.weights import BLOCKS, OFFLOADED, body_prefix, is_offloaded, stored

ModelT = TypeVar("ModelT", bound=nn.Module)

CHANGES = "changes_folder"
"""Attribute of an offloaded model: where new values of its weights are written."""


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


def without_weights(build: Callable[..., PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model without weights, in its checkpoint's dtype; `build` makes it of its config."""
    with torch.device("meta"):
        return build(config, dtype=getattr(config, "dtype", None) or torch.float32)


def load_streamed(
    empty: PreTrainedModel, load: Callable[..., PreTrainedModel], device: str, what: str
) -> PreTrainedModel:
    """Load a model whose blocks stay in their files, and run one after the other over all rows.

    Args:
        empty: the model without weights.
        load: loads it, with options of `from_pretrained`.
        device: where it runs.
        what: what needs it, for messages.

    Raises:
        UnsupportedModelError: if the model is not one chain of blocks.
        ValueError: if transformers would have to rewrite weights.
    """
    blocks = block_list(empty, what)
    with quiet():
        model = load(device_map=device_map(empty, blocks, device))
    vars(model).update({OFFLOADED: True, BLOCKS: blocks})
    return model


def load_in_files(empty: PreTrainedModel, load: Callable[..., PreTrainedModel], device: str) -> PreTrainedModel:
    """Load a model for a sharded or quantised copy: its large weights stay in their files.

    They are loaded if transformers would have to rewrite some, or if the files have other values for weights that the
    config ties. Arguments are those of `load_streamed`.
    """
    try:
        with quiet():
            model = load(device_map=large_on_disk(empty, device))
        vars(model)[OFFLOADED] = True
        for names in (getattr(model, "all_tied_weights_keys", None) or {}).items():
            if not torch.equal(*(stored(model, name, model.get_parameter(name)) for name in names)):
                return load()
    except (ValueError, KeyError):
        return load()
    for kernel in linear_attentions(model).values():
        without_hooks(kernel)
    return model


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
            head = not full.startswith(body_prefix(model))
            free = head and not any(key.startswith(f"{full}.") for key in tied)
            places[full] = "disk" if full == blocks or free else device

    put(model, "")
    return places


def large_on_disk(model: PreTrainedModel, device: str) -> dict[str, str]:
    """Return a device map that leaves blocks, embedding and head in the weights files ("disk").

    Kernels, and weights outside of these, are on the device.
    """
    places: dict[str, str] = {}
    large: set[nn.Parameter] = set()
    for get in (model.get_input_embeddings, model.get_output_embeddings):
        # Some models do not say which they are, others have none.
        with contextlib.suppress(NotImplementedError, AttributeError):
            large.update(get().parameters(recurse=False))
    kernels = set(linear_attentions(model).values())

    def put(module: nn.Module, path: str, inside: bool) -> None:
        # Tied weights belong to several modules.
        tied = not large.isdisjoint(module.parameters(recurse=False))
        inside = inside or isinstance(module, nn.ModuleList) or tied
        if module in kernels or (inside and kernels.isdisjoint(module.modules())):
            places[path] = device if module in kernels else "disk"
            return
        before = f"{path}." if path else ""
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        places.update({f"{before}{name}": device for name, _ in own})
        for name, child in module.named_children():
            put(child, f"{before}{name}", inside)

    put(model, "", False)
    return places


def tie(model: PreTrainedModel) -> None:
    """Make tied weights of an offloaded model one parameter again: each call of a module replaces its own."""
    if is_offloaded(model):
        model.tie_weights(recompute_mapping=False)


def without_hooks(model: ModelT, others: Iterable[nn.Module] = ()) -> ModelT:
    """Remove the hooks that read weights from their files, except in other modules inside, and return the model."""
    kept = {module for other in others for module in other.modules()}
    for module in model.modules():
        if module not in kept and hasattr(module, "_hf_hook"):
            # Imported here, as a plain install has no accelerate.
            from accelerate.hooks import remove_hook_from_module

            remove_hook_from_module(module)
    return model


def in_memory_from_now(model: ModelT) -> ModelT:
    """Remove what marks a model as offloaded, after its hooks, and return the model."""
    for name in (OFFLOADED, BLOCKS, CHANGES, "hf_device_map", "to", "cuda"):
        vars(model).pop(name, None)
    return model


class Changes(dict[str, Any]):
    """New values of weights that are in files: in a file without a name, which is gone with the process.

    Args:
        folder: the folder of that file; None for the system's.
    """

    def __init__(self, folder: str | Path | None) -> None:
        super().__init__()
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115

    def __deepcopy__(self, memo: object) -> Changes:
        return self

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        # Maps of a file begin where every dtype may.
        start = self.file.seek(-(-self.file.seek(0, os.SEEK_END) // 64) * 64)
        self.file.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        self.file.flush()
        super().__setitem__(name, (start, tensor.nbytes, tensor.dtype, tensor.shape))

    def __getitem__(self, name: str) -> Tensor:
        start, size, dtype, shape = super().__getitem__(name)
        numbers = np.memmap(self.file, np.uint8, "c", start, size)  # type: ignore[call-overload]
        return torch.from_numpy(numbers).view(dtype).view(shape)


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Give a model's weight another value, in place of the one in its file (`Changes`, in the folder `CHANGES`)."""
    weight = model.get_parameter(name)
    for other, same in model.named_parameters(remove_duplicate=False):
        if same is weight:
            files, key = _file_of(model, other)
            if not isinstance(files.state_dict, Changes):
                files.state_dict = Changes(vars(model).get(CHANGES))
            files.state_dict[key] = tensor.to(weight.dtype)


def is_changed(model: nn.Module, name: str) -> bool:
    """Tell whether an offloaded weight got another value by `put`."""
    files, key = _file_of(model, name)
    return key in files.state_dict


def _file_of(model: nn.Module, name: str) -> tuple[Any, str]:
    """Return accelerate's reader of a model's weights files, and an offloaded weight's name there."""
    path, _, own = name.rpartition(".")
    hook: Any = model.get_submodule(path)._hf_hook
    return hook.weights_map.dataset, f"{hook.weights_map.prefix}{own}"


@contextlib.contextmanager
def as_if_in_memory(model: nn.Module) -> Iterator[None]:
    """Temporarily give offloaded weights tensors on the CPU that have their size but no contents and no memory.

    peft makes new weights on the device of those that they belong to.
    """
    away = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module._parameters.items()
        if weight is not None and weight.is_meta
    ]
    for module, name, weight in away:
        module._parameters[name] = nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape), False)
    try:
        yield
    finally:
        for module, name, weight in away:
            module._parameters[name] = weight


def size_of_block(model: nn.Module) -> int:
    """Return the bytes of the largest block of an offloaded model."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(sum(weight.nbytes for weight in block.parameters()) for blocks in lists for block in blocks)


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
