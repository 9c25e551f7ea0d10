"""Masks per pair of tokens that say no more than padding and causality are taken, others are refused."""

from __future__ import annotations

import pytest
import torch
from support.tiny import converted, inputs_of, outputs

from linearize.attention.masks import key_padding, visible_keys
from linearize.core.errors import UnsupportedModelError

LOW = torch.finfo(torch.float32).min


def four(padding, causal, query_rows=True):
    """The mask [B, 1, T, T] of a key padding mask [B, T]."""
    tokens = padding.shape[1]
    mask = padding.bool()[:, None, None, :].expand(-1, 1, tokens, -1)
    mask = mask & torch.ones(tokens, tokens, dtype=torch.bool).tril() if causal else mask
    return mask if query_rows else mask & padding.bool()[:, None, :, None]


@pytest.mark.parametrize("query_rows", [True, False], ids=["padded queries see", "they do not"])
@pytest.mark.parametrize("additive", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_what_it_says_is_read(causal, additive, query_rows):
    padding = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1]])
    mask = four(padding, causal, query_rows)
    mask = torch.where(mask, 0.0, LOW) if additive else mask
    assert torch.equal(key_padding(mask, causal), padding.bool())
    assert key_padding(mask, not causal) is None
    # The rows of the last tokens alone, behind a cache; of padding alone, they say nothing.
    assert torch.equal(key_padding(mask[[0, 2], :, 3:], causal), padding[[0, 2]].bool())


def test_what_says_more_is_not_read():
    padding = torch.ones(1, 6)
    window = four(padding, True).tril() & ~four(padding, True).tril(-3)
    assert key_padding(window, True) is None
    assert key_padding(torch.randn(1, 1, 6, 6), False) is None
    assert key_padding(torch.zeros(1, 4, 6, 6), False) is None
    short = torch.tensor([[[[True, False, True]]]])
    assert key_padding(short, False).tolist() == [[True, False, True]]
    assert key_padding(torch.ones(1, 1, 6, 4, dtype=torch.bool), False) is None


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_models_take_them(name):
    model = converted(name)
    inputs = inputs_of(model)
    mask = four(inputs["attention_mask"], name != "bert")
    expected = outputs(model, inputs)[0]
    for given in (mask, torch.where(mask, 0.0, LOW)):
        got = outputs(model, {**inputs, "attention_mask": given})[0]
        assert torch.equal(got[inputs["attention_mask"].bool()], expected[inputs["attention_mask"].bool()])
    window = mask & ~torch.ones_like(mask).tril(-3)
    for given in (window, *([] if name == "gpt2" else [window[:, 0]])):
        with pytest.raises(UnsupportedModelError, match="or an equivalent mask"):
            outputs(model, {**inputs, "attention_mask": given})


@pytest.mark.parametrize(
    "name, options",
    [("llama", {}), ("gpt2", {}), ("llama", {"use_cache": False}), ("gpt2", {"use_cache": False}), ("bert", {})],
)
@pytest.mark.parametrize("kept", [(), (1,)])
def test_a_mask_may_cover_tokens_that_are_read_later(name, options, kept):
    model = converted(name, keep_softmax=kept)
    inputs = inputs_of(model)
    mask = inputs["attention_mask"].roll(3, 1)
    expected = outputs(model, {**inputs, "attention_mask": mask}, **options)[0]
    longer = torch.cat([mask, torch.ones_like(mask)], dim=1)
    assert torch.equal(outputs(model, {**inputs, "attention_mask": longer}, **options)[0], expected)


@pytest.mark.parametrize("additive", [True, False])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
@torch.inference_mode()
def test_a_mask_changed_in_place_is_read_again(name, additive):
    model = converted(name)
    inputs = inputs_of(model)
    padding = torch.ones_like(inputs["attention_mask"])
    masks = [four(one, name != "bert") for one in (padding, padding.index_fill(1, torch.tensor([6, 7, 8]), 0))]
    first, second = (torch.where(mask, 0.0, LOW) if additive else mask.clone() for mask in masks)
    expected = outputs(model, {**inputs, "attention_mask": second})[0]
    outputs(model, {**inputs, "attention_mask": first})
    # Through memory that is shared, no version counter tells of it.
    first.numpy()[:] = second.numpy()
    assert torch.equal(outputs(model, {**inputs, "attention_mask": first})[0], expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [1, 2, 4, 6])
@pytest.mark.parametrize("padded", ["left", "right", "middle", "all", None])
def test_what_softmax_sees(padded, queries, causal):
    """Key by key: the past of each query, without padding; where that is nothing, the query itself (or every key)."""
    real = torch.ones(2, 6, dtype=torch.bool)
    places = {"left": slice(0, 4), "right": slice(4, 6), "middle": slice(2, 4), "all": slice(0, 6), None: slice(0, 0)}
    real[0, places[padded]] = False
    q, k = torch.zeros(2, 1, queries, 4), torch.zeros(2, 1, 6, 4)
    mask, flag = visible_keys(q, k, real[:, None, None] if padded else None, causal=causal)
    found = torch.ones(2, 1, queries, 6, dtype=torch.bool) if mask is None else mask.expand(2, 1, queries, 6)
    found = found.tril() if flag else found
    for row in range(2):
        for i in range(queries):
            at = i + 6 - queries
            seen = [j for j in range(6) if real[row, j] and (j <= at or not causal)]
            alone = [at] if causal and queries > 1 else list(range(6))
            if seen and not real[row, at]:
                # Rows of padding may hold anything.
                continue
            assert found[row, 0, i].nonzero().flatten().tolist() == (seen or alone), (row, i)
