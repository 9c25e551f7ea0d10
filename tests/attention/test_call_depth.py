"""How many functions of ours a reader steps through from transformers' call of the attention to the op's math."""

import sys

import pytest
import torch
from torch import nn

from linearize.attention.interface import attention_forward
from linearize.attention.layer import LinearAttention
from linearize.attention.shape import HeadShape

MATH = ("read_state", "causal_sums")


def path_to_the_math(causal, gradient):
    host = nn.Module()
    host.linear_attention = LinearAttention("hedgehog", {}, HeadShape(2, 2, 8, 8, causal))
    host.linear_attention.reset_parameters(0)
    q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
    stack, paths = [], []

    def watch(frame, event, _):
        if event == "call":
            stack.append((frame.f_globals.get("__name__", ""), frame.f_code.co_qualname))
            if stack[-1][1] in MATH:
                paths.append([name for module, name in stack if module.startswith("linearize.")])
        elif event == "return" and stack:
            stack.pop()

    before = sys.getprofile()
    with torch.set_grad_enabled(gradient):
        sys.setprofile(watch)
        try:
            attention_forward(host, q, k, v)
        finally:
            sys.setprofile(before)
    return paths[0]


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_seven_functions_at_most(causal, gradient):
    path = path_to_the_math(causal, gradient)
    assert path[0] == "attention_forward" and path[-1] in MATH
    assert len(path) <= 7, path
