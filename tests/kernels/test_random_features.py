"""Random features estimate the kernels that the registry says: no bias, and an error that falls as 1 / sqrt(F)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from linearize.core.registry import kernel_infos, make_config

RANDOM = [info for info in kernel_infos() if info.random]
SERIES = [info for info in kernel_infos() if hasattr(info.build, "series")]
DIM, DRAWS, PAIRS = 8, 400, 12
SMALL, LARGE = 32, 512


def estimates(info, size):
    """phi(x) . phi(y) of many draws (the heads of one map) [DRAWS, PAIRS], and the kernel itself [PAIRS]."""
    argument = dataclasses.fields(info.config)[0].name
    features = info.build(make_config(info, {argument: size}), DRAWS, DIM)
    features.reset_parameters(torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.nn.functional.normalize(torch.randn(PAIRS, DIM, generator=generator), dim=-1) for _ in range(2))
    x, y = 0.7 * x, 0.7 * y
    phi = []
    for tokens in (x, y):
        found = features.forward_keys(tokens.expand(1, DRAWS, -1, -1))
        scale = torch.ones(()) if found.log_scale is None else found.log_scale.exp()[..., None]
        phi.append(found.phi * scale)
    return (phi[0] * phi[1]).sum(-1)[0].detach(), info.estimates((x * y).sum(-1))


@pytest.mark.parametrize("info", RANDOM, ids=lambda info: info.name)
def test_the_error_falls_as_one_over_root_f(info):
    errors = []
    for size in (SMALL, LARGE):
        found, kernel = estimates(info, size)
        errors.append(float((found - kernel).square().mean().sqrt()))
    assert 0.7 * 4.0 <= errors[0] / errors[1] <= 1.4 * 4.0


@pytest.mark.parametrize("info", RANDOM, ids=lambda info: info.name)
def test_the_mean_is_the_kernel(info):
    found, kernel = estimates(info, LARGE)
    deviation = found.std(dim=0) / DRAWS**0.5
    assert ((found.mean(dim=0) - kernel).abs() <= 4.5 * deviation + 1e-4).all()


@pytest.mark.parametrize("info", SERIES, ids=lambda info: info.name)
def test_coefficients_are_those_of_the_function(info):
    """The series sums to the function, and each coefficient is its derivative at 0 over N!."""
    for z in (-0.4, 0.1, 0.5):
        total = sum(info.build.series(n) * z**n for n in range(60))
        want = info.estimates(torch.tensor(z, dtype=torch.float64))
        assert total == pytest.approx(float(want), rel=1e-9)
    z = torch.zeros((), dtype=torch.float64, requires_grad=True)
    value, factorial = info.estimates(z), 1.0
    for n in range(7):
        factorial *= max(n, 1)
        assert info.build.series(n) == pytest.approx(float(value.detach()) / factorial, rel=1e-9)
        (value,) = torch.autograd.grad(value, z, create_graph=True)


def test_there_are_random_kernels_and_series():
    assert len(RANDOM) >= 7
    assert len(SERIES) == 5
