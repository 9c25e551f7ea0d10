"""Train weights that a checkpoint stores in half precision, in fp32: half precision loses small updates.

Passes run under autocast in the checkpoint's dtype, so they need the time and the activations of that dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.modeling.weights import device_of

HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The dtypes that lose small updates, and their names as precisions."""


def passes_of(model: nn.Module) -> str:
    """Return the precision of a model's passes while it is trained: "bf16" or "fp16" if it is stored so, else "no".

    "no" also stands for half precision that the device does not train in: fp16 needs a scaled loss, which only CUDA
    has.
    """
    stored = next((parameter for parameter in model.parameters() if parameter.dtype in HALF), None)
    if stored is None:
        return "no"
    device, bf16 = device_of(model).type, stored.dtype == torch.bfloat16
    cuda = device == "cuda"
    trains = device == "cpu" if bf16 and not cuda else cuda and (not bf16 or torch.cuda.is_bf16_supported())
    return HALF[stored.dtype] if trains else "no"


def to_fp32(model: nn.Module, *, whole: bool) -> list[tuple[Tensor, torch.dtype]]:
    """Hold a model's tensors in half precision in fp32; return them with their dtypes.

    Args:
        model: the model; parameters keep their identity.
        whole: whether weights that are not trained are held in fp32 too; passes without autocast need that.
    """
    weights = [parameter for parameter in model.parameters() if whole or parameter.requires_grad]
    held: list[tuple[Tensor, torch.dtype]] = [(x, x.dtype) for x in (*weights, *model.buffers()) if x.dtype in HALF]
    for tensor, _ in held:
        tensor.data = tensor.data.float()
    return held


@contextlib.contextmanager
def in_fp32(*models: nn.Module, whole: bool) -> Iterator[None]:
    """Temporarily hold models' tensors in fp32, as `to_fp32` does; at the end they are rounded to their dtype."""
    held = [tensor for model in models for tensor in to_fp32(model, whole=whole)]
    try:
        yield
    finally:
        for tensor, dtype in held:
            tensor.grad = None
            tensor.data = tensor.data.to(dtype)


@contextlib.contextmanager
def unchanged(*models: PreTrainedModel | None) -> Iterator[None]:
    """Undo at the end what transformers' trainer changes in models: `use_cache` of the config, and `forward`."""
    before = [(model, dict(vars(model.config))) for model in models if model is not None]
    try:
        yield
    finally:
        for model, values in before:
            vars(model.config).clear()
            vars(model.config).update(values)
            end_autocast(model)


def end_autocast(model: nn.Module) -> None:
    """Remove the autocast that accelerate leaves around a model's `forward`."""
    original = vars(model).pop("_original_forward", None)
    if original is not None:
        model.forward = original
        if getattr(original, "__func__", None) is type(model).forward:
            del model.forward
