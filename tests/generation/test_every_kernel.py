"""Every causal kernel, from the registry: generation with a state equals full forwards."""

from __future__ import annotations

import pytest
from support.generation import GREEDY, causal, generate_and_check, prompts

from linearize.core.registry import kernel_infos

CAUSAL = [info for info in kernel_infos() if info.causal and not info.needs_window]


@pytest.mark.sampled("one")
@pytest.mark.parametrize("info", CAUSAL, ids=lambda info: info.name)
def test_greedy(info):
    arguments = {"max_positions": 64} if info.maximum_positions else {}
    # Blocks shorter than the text, where there are blocks.
    arguments |= {"block": 5} if hasattr(info.config, "block") else {}
    model, inputs = causal("llama", info.name, kernel_args=arguments), prompts()
    generate_and_check(model, inputs, **GREEDY, prefill_chunk_size=4)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (4, 0), (64, 0), (1, 2), (4, 3)])
def test_greedy_with_a_softmax_window(window, sinks):
    model, inputs = causal("gpt2", "hedgehog", window=window, sinks=sinks), prompts()
    generate_and_check(model, inputs, **GREEDY)
    generate_and_check(model, inputs, **GREEDY, prefill_chunk_size=4)
