"""A mask over tokens that a state has seen: equal to one call over all tokens where it holds them, else refused."""

from __future__ import annotations

import pytest
import torch
from support.generation import GREEDY, causal, generate_and_check, prompts
from support.kernel_cases import ADDED, DIM, make_inputs, stirred

from linearize.attention.cache import LinearStateLayer, cache_argument
from linearize.attention.layer import LinearAttention
from linearize.core.errors import ConfigError
from linearize.core.registry import kernel_info

SCALING = DIM**-0.5
STREAMED = [case for case in ADDED if case.values[2] == "causal" and case.values[0].streamable]


def layer_of(info, arguments, hybrid):
    mixer = stirred(info, arguments, "causal", **hybrid)
    layer = LinearAttention(info.name, arguments, mixer.shape, mixer.hybrid).eval()
    layer.mixer = mixer
    return layer


@torch.no_grad()
def step(layer, cache, inputs, part, mask):
    q, k, v = (x[:, :, part] for x in inputs)
    cache.update(k, v)
    layer.hand_over(cache)
    return layer(q, k, v, mask, SCALING)


def whole(layer, inputs, stop, mask):
    with torch.no_grad():
        return layer(*(x[:, :, :stop] for x in inputs), mask, SCALING)


def masks():
    """What the first calls said, and what the later ones say: row 0 is padded on the left."""
    old = torch.ones(2, 14, dtype=torch.bool)
    old[0, :3] = False
    new = old.clone()
    new[0, 5] = new[1, 0] = new[1, 8] = False
    return old, new


def changed(layer, inputs, cache, old, new):
    """The outputs of two calls, then of two more under another mask."""
    step(layer, cache, inputs, slice(0, 9), old[:, :9])
    step(layer, cache, inputs, slice(9, 10), old[:, :10])
    return torch.cat(
        [
            step(layer, cache, inputs, slice(10, 12), new[:, :12]),
            step(layer, cache, inputs, slice(12, 13), new[:, :13]),
            step(layer, cache, inputs, slice(13, 14), new[:, :14]),
        ],
        dim=2,
    )


@pytest.mark.parametrize("crop", [0, 1, 20])
@pytest.mark.parametrize("wide", [True, False], ids=["held", "summed"])
@pytest.mark.parametrize(("info", "arguments", "direction", "hybrid"), STREAMED)
@pytest.mark.sampled("pairs", "info", "wide", "crop")
@pytest.mark.sampled("pairs", "hybrid", "wide", "crop")
def test_every_state_follows_or_refuses(info, arguments, direction, hybrid, wide, crop):
    if wide and "window" in hybrid:
        hybrid = hybrid | {"window": 16}
    if hasattr(info.config, "block"):
        arguments = arguments | {"block": 32 if wide else 4}
    layer, inputs, (old, new) = layer_of(info, arguments, hybrid), make_inputs(14), masks()
    cache = LinearStateLayer(crop)
    # The mask changes after ten tokens; the window, the sinks and the exact keys may hold them all, routed blocks do.
    slots = sum(hybrid.get(name, 0) for name in ("window", "sinks", "exact_keys"))
    holds = slots >= 10 or ("block" in arguments and wide)
    # Heads 0 and 3 read both key heads, and so do all.
    routed = hybrid.get("routed_heads", (0, 3)) == (0, 3) and "routed_blocks" in hybrid
    holds = holds or hybrid.get("softmax_heads") == (0, 3) or routed
    holds = (holds and crop == 0) or crop == 20
    if not holds:
        with pytest.raises(ConfigError, match="another mask for tokens that the generation cache has already seen"):
            changed(layer, inputs, cache, old, new)
        return
    got, want = changed(layer, inputs, cache, old, new), whole(layer, inputs, 14, new)[:, :, 10:]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(got, whole(layer, inputs, 14, old)[:, :, 10:], atol=1e-3)


@pytest.mark.parametrize("crop", [0, 20])
def test_exact_keys_and_sinks_hold_tokens_beyond_the_window(crop):
    inputs, (old, new) = make_inputs(14), masks()
    for hybrid in ({"exact_keys": 12}, {"exact_keys": 9, "sinks": 2}, {"exact_keys": 2, "sinks": 9}):
        layer = layer_of(kernel_info("hedgehog"), {}, {"window": 3, "scale": "linear", **hybrid})
        got = changed(layer, inputs, LinearStateLayer(crop), old, new)
        torch.testing.assert_close(got, whole(layer, inputs, 14, new)[:, :, 10:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("crop", [0, 20])
@pytest.mark.parametrize("later", ["ones", "none"])
def test_padding_is_not_taken_in(later, crop):
    """Softmax would see the padding's keys from now on; no state has them."""
    layer, inputs, (old, _) = layer_of(*STREAMED[0].values[:2], {}), make_inputs(14), masks()
    cache = LinearStateLayer(crop)
    step(layer, cache, inputs, slice(0, 9), old[:, :9])
    with pytest.raises(ConfigError, match="another mask"):
        step(layer, cache, inputs, slice(9, 10), torch.ones_like(old[:, :10]) if later == "ones" else None)


@pytest.mark.parametrize("crop", [0, 20])
def test_a_token_behind_the_last_padding_is_hidden_later(crop):
    """The mask that a state remembers ends there; what follows it was all real."""
    layer, inputs, (old, _) = layer_of(*STREAMED[0].values[:2], {}), make_inputs(14), masks()
    cache, late = LinearStateLayer(crop), old.clone()
    late[1, 10] = False
    for part in (slice(0, 9), slice(9, 11)):
        step(layer, cache, inputs, part, old[:, : part.stop])
    if not crop:
        with pytest.raises(ConfigError, match="another mask"):
            step(layer, cache, inputs, slice(11, 12), late[:, :12])
        return
    got = step(layer, cache, inputs, slice(11, 12), late[:, :12])
    torch.testing.assert_close(got, whole(layer, inputs, 12, late[:, :12])[:, :, 11:], rtol=1e-3, atol=1e-4)


def test_a_mask_changes_after_a_crop():
    """No state holds what is left then: it is computed again from the recorded tokens."""
    layer, inputs, (old, new) = layer_of(*STREAMED[0].values[:2], {}), make_inputs(14), masks()
    cache = LinearStateLayer(20)
    step(layer, cache, inputs, slice(0, 12), old[:, :12])
    cache.crop(-2)
    got = step(layer, cache, inputs, slice(10, 14), new)
    torch.testing.assert_close(got, whole(layer, inputs, 14, new)[:, :, 10:], rtol=1e-3, atol=1e-4)


def test_the_same_mask_goes_on():
    """Longer than the tokens so far, of the new tokens alone, and after crops, other orders and repetitions of rows."""
    layer, inputs, (_, new) = layer_of(*STREAMED[0].values[:2], {}), make_inputs(14), masks()
    want = whole(layer, inputs, 14, new)
    cache = LinearStateLayer(3)
    for part, given in ((slice(0, 9), new), (slice(9, 10), new[:, 9:10]), (slice(10, 13), new[:, :13])):
        got = step(layer, cache, inputs, part, given)
        real = new[:, None, part].expand(got.shape[:3])
        torch.testing.assert_close(got[real], want[:, :, part][real], rtol=1e-3, atol=1e-4)
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 0]))
    got = step(layer, cache, inputs, slice(11, 14), new)
    torch.testing.assert_close(got, want[:, :, 11:], rtol=1e-3, atol=1e-4)
    cache.reset()
    assert cache.padding is None and cache.tokens == 0
    torch.testing.assert_close(
        step(layer, cache, inputs, slice(0, 14), ~new)[:, :, -1:], whole(layer, inputs, 14, ~new)[:, :, -1:]
    )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_models(name):
    """A user hides earlier tokens in a later call; generation, which extends its mask, goes on as before."""
    inputs = prompts()
    late = torch.cat([inputs["attention_mask"], torch.ones(3, 1, dtype=torch.long)], dim=1)
    late[1, 2] = 0
    token, positions = inputs["input_ids"][:, :1], (late.cumsum(-1) - 1).clamp(min=0)[:, -1:]
    model = causal(name, window=32, config={"num_hidden_layers": 1} if name == "llama" else {"n_layer": 1})
    ids = torch.cat([inputs["input_ids"], token], dim=1)
    places = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    cache = model.new_cache()
    model(**inputs, position_ids=places, **cache_argument(model, cache))
    got = model(input_ids=token, attention_mask=late, position_ids=positions, **cache_argument(model, cache)).logits
    both = torch.cat([places, positions], dim=1)
    want = model(input_ids=ids, attention_mask=late, position_ids=both, use_cache=False).logits[:, -1:]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    model = causal(name)
    cache = model.new_cache()
    model(**inputs, **cache_argument(model, cache))
    with pytest.raises(ConfigError, match="another mask"):
        model(input_ids=token, attention_mask=late, **cache_argument(model, cache))
    generate_and_check(model, inputs, **GREEDY, prefill_chunk_size=4)
