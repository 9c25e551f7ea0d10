"""Every causal kernel, from the registry: generation with a state equals full forwards."""

from __future__ import annotations

import pytest
import torch
from support.generation import GREEDY, assert_same_text, causal, prompts

from linearize.core.registry import kernel_infos

CAUSAL = [info for info in kernel_infos() if info.causal and not info.needs_window]


@pytest.mark.parametrize("info", CAUSAL, ids=lambda info: info.name)
def test_greedy(info):
    arguments = {"max_positions": 64} if info.maximum_positions else {}
    model, inputs = causal("llama", info.name, kernel_args=arguments), prompts()
    out = model.generate(**inputs, **GREEDY, return_dict_in_generate=True, output_logits=True)
    assert_same_text(model, inputs, out.sequences, out.logits)
    assert torch.equal(model.generate(**inputs, **GREEDY, prefill_chunk_size=4), out.sequences)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (4, 0), (64, 0), (1, 2), (4, 3)])
def test_greedy_with_a_softmax_window(window, sinks):
    model, inputs = causal("gpt2", "hedgehog", window=window, sinks=sinks), prompts()
    out = model.generate(**inputs, **GREEDY, return_dict_in_generate=True, output_logits=True)
    assert_same_text(model, inputs, out.sequences, out.logits)
    assert torch.equal(model.generate(**inputs, **GREEDY, prefill_chunk_size=4), out.sequences)
