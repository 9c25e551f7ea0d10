"""Routed blocks: what the generated matrices of additions do not ask (softmax as the limit, choices, reads, states)."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import DIM, HEADS, KEY_HEADS, decode, make_inputs, make_mixer, naive, run, stepwise, stirred
from support.plain_loss import plain_weights
from support.tiny import converted, inputs_of, original
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import linearize
from linearize.attention.cache import cache_argument
from linearize.attention.interface import attention_forward, linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.attention.parts import exact_tokens
from linearize.attention.shape import HeadShape
from linearize.conversion.plan_file import PlannedLayer
from linearize.core.errors import ConfigError
from linearize.core.registry import Hybrid, kernel_info
from linearize.fidelity.ablate import ablated
from linearize.ops import routed, window_parts

HEDGEHOG = kernel_info("hedgehog")
ROUTED = {"window": 4, "sinks": 3, "scale": "linear", "routed_blocks": "2:3"}
LAYOUTS = {"none": [], "left": range(6), "right": range(18, 24), "middle": [5, 6, 7, 13, 14, 20]}
TOKENS = 24


def mask_of(layout):
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[0, LAYOUTS[layout]] = False
    return mask


def softmax(q, k, v, causal):
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("heads", [(), (1,), (0, 2, 3)], ids=["all", "one", "three"])
@pytest.mark.parametrize("blocks", ["2:3", "6:1"])
@torch.no_grad()
def test_weights_are_the_written_out_ones(blocks, heads, direction, layout):
    """Blocks are counted without padding, and each query head of a group chooses its own."""
    mixer = stirred(HEDGEHOG, {}, direction, **ROUTED | {"routed_blocks": blocks, "routed_heads": heads})
    mask = mask_of(layout)
    q, k, v = make_inputs(TOKENS)
    got = run(mixer, q, k, v, mask)[0]
    for row, real in enumerate(mask):
        own = [x[row][:, real] for x in (q, k, v)]
        tokens = int(real.sum())
        visible = torch.ones(tokens, tokens, dtype=torch.bool)
        visible = visible.tril() if direction == "causal" else visible
        scores = DIM**-0.5 * own[0].double() @ own[1].repeat_interleave(2, 0).double().mT
        weights, sums, _ = plain_weights(mixer, scores, visible, *own[:2], DIM**-0.5, None)
        want = weights / sums @ own[2].repeat_interleave(2, 0).double()
        torch.testing.assert_close(got[row][:, real].double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("blocks", ["5:4", "99:4", "3:8"])
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@torch.no_grad()
def test_all_blocks_are_softmax(direction, blocks):
    mixer = stirred(HEDGEHOG, {}, direction, **ROUTED | {"window": 8, "sinks": 0, "routed_blocks": blocks})
    inputs, causal = make_inputs(TOKENS), direction == "causal"
    torch.testing.assert_close(run(mixer, *inputs)[0], softmax(*inputs, causal), rtol=1e-4, atol=1e-5)
    if causal:
        torch.testing.assert_close(stepwise(mixer, *inputs)[0], softmax(*inputs, True), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sinks", [0, 2, 3, 7])
@pytest.mark.parametrize("window", [4, 7])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(), (1, 2)], ids=["all", "some"])
@torch.no_grad()
def test_the_longest_exact_row(heads, causal, window, sinks):
    hybrid = {**ROUTED, "window": window, "sinks": sinks, "routed_heads": heads}
    mixer = stirred(HEDGEHOG, {}, "causal" if causal else "bidirectional", **hybrid)
    longest = exact_tokens(Hybrid(**hybrid), causal)
    inputs = make_inputs(longest)
    torch.testing.assert_close(run(mixer, *inputs)[0], softmax(*inputs, causal), rtol=1e-4, atol=1e-5)


@pytest.fixture
def reads(monkeypatch):
    """How many keys each query looked up, in order, and "all" whenever some queries multiplied all features."""
    reads, sums, unchosen = [], routed._sums, routed.unchosen_sum

    def noting(hidden, *tensors):
        reads.append(hidden.shape[1])
        return sums(hidden, *tensors)

    monkeypatch.setattr(routed, "_sums", noting)
    monkeypatch.setattr(routed, "unchosen_sum", lambda *inputs: reads.append("all") or unchosen(*inputs))
    return reads


@pytest.mark.parametrize("kernel", ["hedgehog", "none", "luna"])
@torch.no_grad()
def test_queries_read_the_chosen_blocks_alone(kernel, reads):
    """Unless the kernel's weights of these keys are so much larger than softmax's that a difference is inexact."""
    scale = {"scale": "none"} if kernel != "hedgehog" else {}
    mixer, inputs = stirred(kernel_info(kernel), {}, "causal", **ROUTED | scale), make_inputs(TOKENS)
    got, state = stepwise(mixer, *inputs, prefill=10)
    torch.testing.assert_close(got, naive(mixer, *inputs), rtol=1e-3, atol=1e-4)
    assert state["tokens"].tolist() == [TOKENS] * 2 and len(reads) >= 1 + TOKENS - 10
    assert set(reads) == ({2 * 3} if kernel != "luna" else {2 * 3, "all"})


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is computed."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_no_tensor_is_as_large_as_all_weights(direction, monkeypatch):
    monkeypatch.setattr(routed, "NUMBERS", 1 << 12)
    monkeypatch.setattr(window_parts, "CHOSEN_AT_ONCE", 1 << 12)
    mixer = stirred(HEDGEHOG, {}, direction, **ROUTED | {"routed_blocks": "2:4"})
    q, k, v = (x.requires_grad_() for x in make_inputs(384, batch=1))
    with Largest() as largest:
        torch.autograd.grad(run(mixer, q, k, v)[0].sum(), [q, k, v, *mixer.parameters()])
    # The inputs have 384 numbers per channel and head, the weights 384 per query and head.
    assert HEADS * 384 * DIM <= largest.numbers < HEADS * 384 * 384 // 4


@pytest.mark.parametrize("length", [1, 3, 40, 200, 1001])
@pytest.mark.parametrize("values", [3, 10**6])
def test_of_equal_blocks_the_first_are_chosen(length, values):
    draw = torch.Generator().manual_seed(length)
    scores = torch.randint(values, (2, 5, length), generator=draw).float()
    scores[torch.rand(scores.shape, generator=draw) < 0.3] = -torch.inf
    got = window_parts._highest(scores.clone(), min(4, length))
    want = scores.sort(dim=-1, descending=True, stable=True).indices[..., : got.shape[-1]]
    want = want.masked_fill(scores.gather(-1, want) == -torch.inf, -1)
    assert torch.equal(got.sort(dim=-1).values, want.sort(dim=-1).values)


@torch.no_grad()
def test_a_step_writes_into_the_memory():
    """It is copied once in many tokens, when it is full; with a gradient, the state before stays as it is."""
    mixer, (q, k, v) = stirred(HEDGEHOG, {}, "causal", **ROUTED), make_inputs(120)
    _, state = run(mixer, q[:, :, :60], k[:, :, :60], v[:, :, :60], needs_state=True)
    with torch.enable_grad():
        before = {name: x.clone() for name, x in state.items()}
        run(mixer, *(x[:, :, 60:61] for x in (q, k, v)), state=state, needs_state=True)
        assert all(torch.equal(state[name], x) for name, x in before.items())
    places = set()
    for i in range(60, 120):
        _, state = decode(mixer, *(x[:, :, i : i + 1] for x in (q, k, v)), state=state)
        places.add(state["all_k"].data_ptr())
    whole = run(mixer, q, k, v, needs_state=True)[1]
    assert len(places) <= 8 and state["all_k"].shape[2] <= 120 * 9 // 8 + 3
    assert torch.equal(state["channels"], state["all_k"].mT)
    for name in ("all_k", "all_v"):
        torch.testing.assert_close(state[name][:, :, : whole[name].shape[2]], whole[name], rtol=0, atol=1e-6)
        assert not state[name][:, :, whole[name].shape[2] :].any()


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("at_once", [1, 1 << 22])
@pytest.mark.parametrize("largest", [1e-30, 30.0])
def test_gradients_are_those_of_the_weights(direction, at_once, largest, monkeypatch):
    monkeypatch.setattr(routed, "NUMBERS", at_once)
    monkeypatch.setattr(routed, "LARGEST", largest)
    mixer, mask = stirred(HEDGEHOG, {}, direction, **ROUTED), mask_of("middle")
    real, results = mask[:, None].expand(2, HEADS, -1), []
    for compute in (lambda *inputs: run(mixer, *inputs, mask)[0], lambda *inputs: naive(mixer, *inputs, mask)):
        leaves = [x.requires_grad_() for x in make_inputs(TOKENS)]
        out = compute(*leaves)
        results.append([out[real], *torch.autograd.grad(out[real].square().sum(), [*leaves, *mixer.parameters()])])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_computes_in_fp32(dtype):
    mixer = stirred(HEDGEHOG, {}, "causal", **ROUTED)
    inputs = [x.to(dtype) for x in make_inputs(TOKENS)]
    want, steps = run(mixer, *(x.float() for x in inputs))[0].to(dtype), stepwise(mixer, *inputs, prefill=9)[0]
    assert steps.dtype == dtype
    torch.testing.assert_close(run(mixer, *inputs)[0], want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(steps, want, rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_weights_do_not_follow_autocast():
    """The layer computes in fp32; weights in bf16 would be those of other blocks."""
    host = torch.nn.Module()
    host.linear_attention = LinearAttention(
        "hedgehog", {}, HeadShape(HEADS, KEY_HEADS, DIM, DIM, True), Hybrid(**ROUTED)
    )
    host.linear_attention.reset_parameters(0)
    inputs = make_inputs(TOKENS, width=DIM)
    found = []
    for on in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            found.append(attention_forward(host, *inputs, None, output_attentions=True))
    for plain, under in zip(*found, strict=True):
        assert torch.equal(plain, under)


def test_gradients_do_not_follow_autocast():
    """Keys are gathered again in the backward pass, which a loop may run under autocast."""
    draw = torch.Generator().manual_seed(0)
    q, phi_q, k, v, phi = (torch.randn(6, width, generator=draw).requires_grad_() for width in (8, 4, 24, 9, 12))
    found = []
    for on in (False, True):
        table, hidden = torch.arange(12).view(6, 2) % 5, lambda rows: torch.zeros(6, 6, dtype=torch.bool)[rows]
        sums = routed._look_up(2, table, hidden, q, phi_q, (k, v, phi, torch.zeros(6, 3)))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            loss = sums[0].square().sum() + sums[2].square().sum()
            found.append(torch.autograd.grad(loss, [q, phi_q, k, v, phi]))
    for plain, under in zip(*found, strict=True):
        assert torch.equal(plain, under)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_generation_crops_reorders_and_follows_beams(name):
    model = converted(name, "AutoModelForCausalLM", window=3, routed_blocks="2:2")
    ids = inputs_of(model, tokens=17)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    for beams in (1, 3):
        cached = model.generate(ids, num_beams=beams, **options)
        assert torch.equal(cached, model.generate(ids, num_beams=beams, use_cache=False, **options))
    cache = model.new_cache(crop=4)
    model(ids, **cache_argument(model, cache))
    cache.crop(-3)
    got = model(ids[:, -3:], **cache_argument(model, cache)).logits
    torch.testing.assert_close(got, model(ids).logits[:, -3:], rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_packed_documents_are_rows():
    model = converted("llama", "AutoModelForCausalLM", window=3, routed_blocks="2:2")
    ids = inputs_of(model, tokens=20)["input_ids"][:1]
    places = torch.cat([torch.arange(13), torch.arange(7)])[None]
    apart = [model(part, use_cache=False).logits for part in ids.split([13, 7], dim=1)]
    got = model(ids, position_ids=places, use_cache=False).logits
    torch.testing.assert_close(got, torch.cat(apart, dim=1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("hybrid", "message"),
    [
        ({"routed_blocks": 4}, "routed-blocks: got 4:1 without a window, expected both"),
        ({"window": 8, "routed_heads": (1,)}, r"routed-heads: got \[1\] without routed blocks"),
        ({"window": 8, "routed_blocks": 2, "routed_heads": (1, 4)}, r"routed-heads: got \[1, 4\], expected numbers of"),
        (
            {"window": 8, "routed_blocks": 2, "routed_heads": (1, 2), "softmax_heads": (2,)},
            "routed-heads: got head 2, which keeps softmax",
        ),
        (
            {"window": 4, "routed_blocks": "4:8"},
            "routed-blocks: got blocks of 8 keys with a window of 4",
        ),
        ({"window": 8, "routed_blocks": 0}, "routed-blocks: got 0, expected a number of blocks"),
        ({"window": 8, "routed_blocks": "2:0"}, "routed-blocks: got '2:0', expected a number of blocks"),
        ({"window": 8, "routed_blocks": "two"}, "routed-blocks: got 'two', expected a number of blocks"),
        ({"window": 8, "routed_blocks": True}, "routed-blocks: got True, expected a number of blocks"),
        ({"window": 8, "scale": "linear", "routed_blocks": 2, "exact_keys": 3}, "together with exact keys"),
    ],
)
def test_wrong_values_are_refused(hybrid, message):
    with pytest.raises(ConfigError, match=message):
        make_mixer(HEDGEHOG, causal=True, **hybrid)


def test_kernels_without_a_denominator_are_refused():
    with pytest.raises(ConfigError, match="takes no window"):
        make_mixer(kernel_info("diag_softmax"), causal=True, window=8, routed_blocks=2)


def test_a_plan_for_a_softmax_layer_is_refused():
    with pytest.raises(ConfigError, match="the layer stays softmax, which takes no arguments"):
        PlannedLayer(layer=0, module="m", kernel="softmax", window=8, routed_blocks="2:3")


@torch.no_grad()
def test_the_part_is_taken_out_and_put_back():
    model = converted("bert", window=3, routed_blocks="2:2")
    inputs = inputs_of(model, tokens=20)
    before = model(**inputs)[0]
    without = linearize.convert(original("bert"), "hedgehog", window=3)
    without.load_state_dict(model.state_dict())
    with ablated(model, "routed"):
        torch.testing.assert_close(model(**inputs)[0], without(**inputs)[0], rtol=1e-3, atol=1e-5)
    assert torch.equal(model(**inputs)[0], before)
    assert {layer.hybrid.blocks for layer in linear_attentions(model).values()} == {(2, 2)}
    with pytest.raises(ConfigError, match="no layer of this model has routed blocks"), ablated(without, "routed"):
        pass
