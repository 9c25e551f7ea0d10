"""What holds for every kernel with every addition that it takes: weights, and numbers that are none."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import ADDED, make_inputs, naive, run, stirred
from support.numerics_cases import ENGINES

TOKENS = 20
MATRIX = pytest.mark.parametrize(("info", "arguments", "direction", "hybrid"), ADDED)


def padding(tokens=TOKENS):
    """A row padded on the left and in the middle, one on the right."""
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[0, :5] = mask[0, 9:12] = mask[1, -7:] = False
    return mask


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@ENGINES
@MATRIX
@torch.no_grad()
@pytest.mark.sampled("pairs", "info", "hybrid", "direction", "native", "padded")
def test_weights_are_those_of_the_output(switch, info, arguments, direction, hybrid, native, padded):
    switch(native)
    mixer, mask = stirred(info, arguments, direction, **hybrid), padding() if padded else None
    inputs = make_inputs(TOKENS)
    real = padding()[:, None].expand(2, inputs[0].shape[1], -1) if padded else slice(None)
    out, want = run(mixer, *inputs, mask)[0][real], naive(mixer, *inputs, mask)[real]
    torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-4 * max(1.0, float(want.abs().max())))
