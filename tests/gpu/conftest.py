"""The device that these tests run on: always the CPU, and a CUDA device if there is one (`make gpu`)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    """cpu, and cuda with the mark `gpu`."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device; `make gpu` runs this where there is one")
    return torch.device(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request) -> torch.dtype:
    """Type of the values, or of the model."""
    return request.param


@pytest.fixture(autouse=True)
def exact_products():
    """Products of fp32 numbers are not rounded to TF32, whatever was set before."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = before
