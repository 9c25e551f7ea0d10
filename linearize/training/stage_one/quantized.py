"""`--quantize-frozen`: stage one on a copy of the frozen model whose linear maps bitsandbytes holds in 4 or 8 bits.

Only the copy is quantised, one weight after the other as it is read from the model or its files. Kernels stay fp32, and
what is saved are the model's own weights. In 4 bits, weights are NF4 in groups of 64, whose scales have 8 bits
(QLoRA, arXiv 2305.14314); in 8 bits, rows are scaled on their own and outliers of the input stay in half precision
(LLM.int8(), arXiv 2208.07339).
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from linearize.attention.interface import linear_attentions
from linearize.conversion.gguf import find_gguf
from linearize.core.errors import ConfigError, UnsupportedModelError, missing_package
from linearize.fidelity.teacher import body_of
from linearize.modeling.weights import stored
from linearize.training.processes import under_fsdp
from linearize.training.sharding import empty_copy, fill

OUTLIERS = 6.0
"""Inputs of an 8-bit map that are larger stay in half precision (LLM.int8(), section 3.2)."""


def check_quantized(name: str) -> None:
    """Check, before a model is loaded, that its frozen weights can be quantised.

    Args:
        name: Hub name, folder or file of the model.

    Raises:
        ConfigError: under FSDP, or for a GGUF file, whose weights are already quantised and would be read in fp32.
        MissingPackageError: if bitsandbytes is not installed.
    """
    if find_gguf(name) is not None:
        raise ConfigError(f"quantize_frozen: got the GGUF file {name!r}, expected a checkpoint in safetensors files")
    _bitsandbytes()


def _bitsandbytes() -> ModuleType:
    """Import bitsandbytes, which is not part of the plain install.

    Raises:
        ConfigError: under FSDP, which cannot shard what it quantises.
        MissingPackageError: if it is not installed.
    """
    if under_fsdp():
        raise ConfigError("quantize_frozen: got FSDP, expected one process or DDP; leave one of them out")
    try:
        return importlib.import_module("bitsandbytes")
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from error


@torch.no_grad()
def quantized_copy(model: PreTrainedModel, how: str, device: torch.device) -> PreTrainedModel:
    """Return a copy of a converted model with quantised linear maps, for passes of its body.

    Args:
        model: the model; its kernels are those of the copy too, and are moved to the device.
        how: "4bit" or "8bit".
        device: where the copy is.

    Raises:
        UnsupportedModelError: if no linear map can be quantised.
        ConfigError, MissingPackageError: as in `_bitsandbytes`.
    """
    library = _bitsandbytes()
    copied = empty_copy(model, device)
    body = body_of(copied)
    own = model.state_dict(keep_vars=True)
    kernels = linear_attentions(model).values()
    inside, in_kernels = set(body.modules()), {module for kernel in kernels for module in kernel.modules()}
    # Some models compute in the dtype of a weight, which they name here (T5).
    whole = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    count = 0
    for name, module in list(copied.named_modules()):
        linear = type(module) in (nn.Linear, Conv1D) and module in inside and module not in in_kernels
        if not linear or not whole.isdisjoint(name.split(".")):
            continue
        weight, bias = (
            stored(model, key, own[key]) if key in own else None for key in (f"{name}.weight", f"{name}.bias")
        )
        assert weight is not None
        weight = weight.T.contiguous() if type(module) is Conv1D else weight
        copied.set_submodule(name, _quantized(library, how, weight, bias, device))
        count += 1
    if not count:
        raise UnsupportedModelError(
            f"quantize_frozen: {type(model).__name__} has no linear maps that bitsandbytes quantises; leave it out"
        )
    fill(copied, model, device, body)
    return copied


def _quantized(
    library: ModuleType, how: str, weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device
) -> nn.Module:
    """Return a quantised linear map with a weight [out, in] and a bias [out]."""
    rows, columns = weight.shape
    made: nn.Module
    with torch.device("meta"):
        if how == "4bit":
            made = library.nn.Linear4bit(columns, rows, bias is not None, weight.dtype, quant_type="nf4")
            # Where processors compute with bf16 numbers, it would round scales to bf16, and fail for rows that are not
            # multiples of 64.
            vars(made)["support_avx512bf16_for_cpu"] = False
        else:
            made = library.nn.Linear8bitLt(columns, rows, bias is not None, has_fp16_weights=False, threshold=OUTLIERS)
    if how == "4bit":
        made.weight = library.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    else:
        made.weight = library.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.clone(), requires_grad=False)
    # Moving it quantises it.
    return made.to(device)
