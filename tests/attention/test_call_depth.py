"""How many functions of ours run, and how deep, from transformers' call of the attention to the math in PyTorch."""

import sys
from itertools import count

import pytest
import torch
from torch import nn

from linearize.attention.cache import LinearStateLayer
from linearize.attention.interface import attention_forward
from linearize.attention.layer import LinearAttention
from linearize.attention.shape import HeadShape
from linearize.core.registry import Hybrid

SUMS = ("read_state", "causal_sums")
"""The innermost ops."""
MATH = ("causal_attention", "gather_keys", "read_state", "advance", "window_attention")
"""The ops that backends call; what they call themselves is the formula."""


def host_of(causal, hybrid=None):
    host = nn.Module()
    host.linear_attention = LinearAttention("hedgehog", {}, HeadShape(4, 2, 8, 8, causal), hybrid or Hybrid())
    host.linear_attention.reset_parameters(0)
    return host


def tokens(length=10):
    return torch.randn(1, 4, length, 8), *(torch.randn(1, 2, length, 8) for _ in range(2))


def paths_of(host, inputs):
    """Return the path of our functions to each call of one of ours."""
    stack, paths = [], []

    def watch(frame, event, _):
        if event == "call":
            stack.append((frame.f_globals.get("__name__", ""), frame.f_code.co_qualname))
            if stack[-1][0].startswith("linearize."):
                paths.append([name for module, name in stack if module.startswith("linearize.")])
        elif event == "return" and stack:
            stack.pop()

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        attention_forward(host, *inputs)
    finally:
        sys.setprofile(before)
    return paths


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_seven_functions_at_most(causal, gradient):
    with torch.set_grad_enabled(gradient):
        path = next(path for path in paths_of(host_of(causal), tokens()) if path[-1] in SUMS)
    assert path[0] == "attention_forward"
    assert len(path) <= 7, path


def calls_to_the_math(host, inputs):
    """Count the calls of the second time, from the layer on, without those inside the math."""
    for turn in count():
        paths = paths_of(host, inputs(turn))
        if turn == 2:
            below = [path for path in paths if "LinearAttention.forward" in path]
            assert any(path[-1] in MATH for path in below)
            return len([path for path in below if not set(path[:-1]) & set(MATH)])


@pytest.mark.parametrize("window", [None, 4])
def test_calls_from_the_layer_to_the_math(window):
    host = host_of(True, None if window is None else Hybrid(window=window, scale="linear"))
    state = LinearStateLayer()

    def step(turn):
        inputs = tokens(10 if turn == 0 else 1)
        state.update(*inputs[1:])
        host.linear_attention.hand_over(state)
        return inputs

    with torch.no_grad():
        rows, steps = calls_to_the_math(host, lambda turn: tokens()), calls_to_the_math(host, step)
    assert rows <= 40 and steps <= (30 if window is None else 60), (rows, steps)
