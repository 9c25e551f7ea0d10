"""A softmax window joined to every kernel of the registry that takes one."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import CASES, DIM, directions, make_inputs, make_mixer, naive, run, stepwise

from linearize.attention.factory import build_mixer
from linearize.attention.hybrid import per_head
from linearize.attention.shape import HeadShape
from linearize.core.errors import ConfigError
from linearize.core.registry import Hybrid, kernel_info, kernel_infos, make_config

TOKENS, WINDOW = 26, 5
WINDOWED = [(info, arguments) for info, arguments in CASES if info.windowed]
IDS = ["-".join([info.name, *(f"{k}={v}" for k, v in arguments.items())]) for info, arguments in WINDOWED]
BOTH = [
    pytest.param(info, arguments, direction, id=f"{name}-{direction}")
    for (info, arguments), name in zip(WINDOWED, IDS, strict=True)
    for direction in directions(info)
]


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("info", "arguments", "direction"), BOTH)
@pytest.mark.sampled("values")
@pytest.mark.sampled("pairs", "info", "direction", "padded", "sinks")
def test_fast_equals_naive(info, arguments, direction, padded, sinks):
    mixer = make_mixer(info, arguments, causal=direction == "causal", window=WINDOW, sinks=sinks)
    # A query's scale counts here: it does not cancel against the window, so that every parameter is used.
    check_equals_naive(mixer, padded, allow_unused=False)


def check_equals_naive(mixer, padded, *, allow_unused):
    """Output and gradients of the fast way equal those of the written-out weights."""
    inputs = [x.requires_grad_() for x in make_inputs(TOKENS)]
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    if padded:
        mask[0, :7], mask[1, -6:] = False, False
    real = mask[:, None].expand(-1, 4, -1)
    fast, _ = run(mixer, *inputs, mask if padded else None)
    reference = naive(mixer, *inputs, mask if padded else None)
    torch.testing.assert_close(fast[real], reference[real], rtol=1e-3, atol=1e-4)
    leaves = [*inputs, *mixer.parameters()]
    weights = torch.linspace(-1, 1, fast.numel()).reshape(fast.shape)
    got, want = (
        torch.autograd.grad((out * weights)[real].sum(), leaves, allow_unused=allow_unused) for out in (fast, reference)
    )
    for one, two in zip(got, want, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two, rtol=2e-3, atol=2e-3 * max(1.0, float(two.abs().max())))


@pytest.mark.sampled("values")
@pytest.mark.parametrize(("prefill", "sinks"), [(0, 3), (3, 0), (9, 3)])
@pytest.mark.parametrize(("info", "arguments"), WINDOWED, ids=IDS)
def test_step_by_step_equals_at_once(info, arguments, prefill, sinks):
    if not info.causal:
        pytest.skip("bidirectional only")
    mixer = make_mixer(info, arguments, causal=True, window=WINDOW, sinks=sinks)
    inputs = make_inputs(TOKENS)
    whole, _ = run(mixer, *inputs)
    steps, state = stepwise(mixer, *inputs, prefill=prefill)
    torch.testing.assert_close(steps, whole, rtol=1e-3, atol=1e-4)
    assert state["ring_k"].shape[2] == WINDOW
    assert ("sink_k" in state) == bool(sinks) and (not sinks or state["sink_k"].shape[2] == sinks)


@pytest.mark.parametrize(("info", "arguments", "direction"), BOTH)
def test_weights_sum_to_one_and_a_wide_window_is_softmax(info, arguments, direction):
    mixer = make_mixer(info, arguments, causal=direction == "causal", window=WINDOW)
    q, k, _ = make_inputs(TOKENS)
    weights = mixer.weights(q, k, scaling=DIM**-0.5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), rtol=1e-4, atol=1e-4)
    assert not mixer.positive or (weights >= 0).all()
    wide = make_mixer(info, arguments, causal=direction == "causal", window=3 * TOKENS)
    scores = DIM**-0.5 * q @ k.repeat_interleave(2, 1).transpose(-1, -2)
    if direction == "causal":
        scores = scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(wide.weights(q, k, scaling=DIM**-0.5), scores.softmax(-1), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (0, "window: got 0, expected a number of tokens, 1 or more"),
        (-8, "window: got -8"),
        (2.5, "window: got 2.5"),
        (True, "window: got True"),
    ],
)
def test_windows_that_are_none(window, message):
    for info in kernel_infos():
        if not info.windowed:
            continue
        with pytest.raises(ConfigError, match=message):
            build_mixer(info.name, {"max_positions": 9} if info.maximum_positions else {}, _shape(), Hybrid(window))


@pytest.mark.parametrize(
    ("window", "sinks", "message"),
    [
        (None, 4, "sinks: got 4 without a window, expected both"),
        (8, -1, "sinks: got -1, expected a number of tokens, 0 or more"),
        (8, 1.5, "sinks: got 1.5"),
        (8, True, "sinks: got True"),
    ],
)
def test_sinks_that_are_none(window, sinks, message):
    with pytest.raises(ConfigError, match=message):
        build_mixer("hedgehog", {}, _shape(), Hybrid(window, sinks))


HYBRIDS = [
    {"scale": "linear"},
    {"scale": "network", "sinks": 2},
    {"scale": "linear", "exact_keys": 3, "sinks": 2},
    {"scale": "none", "exact_keys": 40},
    {"scale": "linear", "exact_keys": 2, "softmax_heads": (0, 3)},
]
FADING = [
    {"scale": "linear", "trained_length": 9},
    {"scale": "network", "trained_length": 12, "exact_keys": 2, "sinks": 1, "softmax_heads": (0, 3)},
]
SCALED = [case for case in BOTH if case.values[0].is_positive(make_config(*case.values[:2]))]


def learned(info, arguments, direction, **hybrid):
    """A mixer whose scales are not zero."""
    mixer = make_mixer(info, arguments, causal=direction == "causal", window=WINDOW, **hybrid)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if "_scale." in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return mixer


@pytest.mark.parametrize("split", [True, False], ids=["heads split", "heads apart"])
@pytest.mark.parametrize("batch", [1, 3])
def test_log_scales_are_one_product_per_token(batch, split):
    """As hosts lay tokens out, [B, T, H, D], and as a copy does, [B, H, T, D]."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(batch, 7, 2, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(2, 5, generator=generator, dtype=torch.float64).requires_grad_()
    x = (tokens.transpose(1, 2) if split else tokens.transpose(1, 2).contiguous()).requires_grad_()
    expected = (x * weight[:, None]).sum(dim=-1)
    torch.testing.assert_close(per_head(x, weight), expected)
    found, wanted = (torch.autograd.grad(y.sin().sum(), (x, weight)) for y in (per_head(x, weight), expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("hybrid", HYBRIDS, ids=lambda x: "-".join(map(str, x)))
@pytest.mark.parametrize(("info", "arguments", "direction"), SCALED)
@pytest.mark.sampled("pairs", "info", "direction", "padded", "hybrid")
def test_scales_exact_keys_and_softmax_heads_equal_naive(info, arguments, direction, hybrid, padded):
    check_equals_naive(learned(info, arguments, direction, **hybrid), padded, allow_unused=True)


@pytest.mark.parametrize("prefill", [0, 3, 9, 20])
@pytest.mark.parametrize("hybrid", [*HYBRIDS, *FADING], ids=lambda x: "-".join(map(str, x)))
def test_a_hybrid_decodes_step_by_step(hybrid, prefill):
    mixer = learned(kernel_info("hedgehog"), {}, "causal", **hybrid)
    inputs = make_inputs(TOKENS)
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[0, :4] = False
    whole, _ = run(mixer, *inputs, mask)
    steps, state = stepwise(mixer, *inputs, mask, prefill=prefill)
    real = mask[:, None].expand(-1, 4, -1)
    torch.testing.assert_close(steps[real], whole[real], rtol=1e-3, atol=1e-4)
    assert ("softmax_k" in state) == ("softmax_heads" in hybrid)
    if "softmax_heads" in hybrid:
        # Heads 0 and 3 read both key heads; those are all that is cached.
        assert state["softmax_k"].shape == (2, 2, TOKENS, DIM)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("hybrid", FADING, ids=["plain", "exact"])
def test_a_hybrid_that_fades_equals_naive(hybrid, padded):
    check_equals_naive(learned(kernel_info("hedgehog"), {}, "causal", **hybrid), padded, allow_unused=True)


def test_the_linear_part_fades_beyond_the_trained_length():
    """Up to it nothing changes; the n-th token's far weights, before the division, fall by (N / n) squared."""
    fading = learned(kernel_info("hedgehog"), {}, "causal", scale="linear", trained_length=9)
    plain = learned(kernel_info("hedgehog"), {}, "causal", scale="linear")
    q, k, v = make_inputs(TOKENS)
    ours, theirs = (mixer.weights(q, k, scaling=0.3) for mixer in (fading, plain))
    assert torch.equal(ours[:, :, :9], theirs[:, :, :9])
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    far = (theirs * (distance >= WINDOW)).sum(dim=-1)
    odds = far / (1 - far) * (9 / torch.arange(1, TOKENS + 1).clamp(min=9)) ** 2
    torch.testing.assert_close((ours * (distance >= WINDOW)).sum(dim=-1), odds / (1 + odds))
    out, want = run(fading, q, k, v)[0], run(plain, q, k, v)[0]
    torch.testing.assert_close(out[:, :, :9], want[:, :, :9])
    assert not torch.allclose(out[:, :, -1], want[:, :, -1], atol=1e-3)


def test_softmax_heads_are_softmax():
    mixer = learned(kernel_info("elu"), {}, "causal", softmax_heads=(1,))
    q, k, v = make_inputs(TOKENS)
    out, _ = run(mixer, q, k, v)
    want = torch.nn.functional.scaled_dot_product_attention(q[:, 1], k[:, 0], v[:, 0], is_causal=True)
    torch.testing.assert_close(out[:, 1], want)
    assert not torch.allclose(out[:, 0], want, atol=1e-2)


@pytest.mark.parametrize("hybrid", [*HYBRIDS, *FADING], ids=lambda x: "-".join(map(str, x)))
def test_values_may_be_in_half_precision_alone(hybrid):
    """Under autocast, rotary positions leave queries and keys in fp32: heads that keep softmax ended in a traceback."""
    mixer = learned(kernel_info("hedgehog"), {}, "causal", **hybrid)
    q, k, v = make_inputs(TOKENS)
    half = v.bfloat16()
    want = run(mixer, q, k, half.float())[0]
    for out in (run(mixer, q.requires_grad_(), k, half)[0], stepwise(mixer, q.detach(), k, half, prefill=9)[0]):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_new_scales_change_nothing(direction):
    """They start at zero; without a window a query's would cancel, so it does not exist."""
    for hybrid in ({"window": 5}, {}):
        plain = make_mixer(kernel_info("hedgehog"), causal=direction == "causal", **hybrid)
        for scale in ("linear", "network"):
            scaled = make_mixer(kernel_info("hedgehog"), causal=direction == "causal", **hybrid, scale=scale)
            inputs = make_inputs(TOKENS)
            torch.testing.assert_close(run(scaled, *inputs)[0], run(plain, *inputs)[0])
            assert (scaled.query_scale is None) == (not hybrid)


def test_no_kernel_is_the_window_alone():
    mixer = make_mixer(kernel_info("none"), causal=True, window=5, sinks=2)
    q, k, v = make_inputs(TOKENS)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    seen = (distance >= 0) & ((distance < 5) | (torch.arange(TOKENS) < 2))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    torch.testing.assert_close(run(mixer, q, k, v)[0], want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(naive(mixer, q, k, v), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "hybrid", "message"),
    [
        ("none", {}, "kernel 'none': got no window"),
        ("none", {"window": 4, "exact_keys": 2}, "kernel 'none' has no scale by which to choose keys"),
        ("none", {"window": 4, "scale": "linear"}, "kernel 'none' has no features to scale"),
        ("flexformer_n", {"scale": "linear"}, "kernel 'flexformer_n' can have negative weights"),
        ("norm_elu", {"scale": "linear"}, "kernel 'norm_elu' takes no scale"),
        ("diag_softmax", {"softmax_heads": (0,)}, "kernel 'diag_softmax' takes no softmax-heads"),
        ("hedgehog", {"scale": "cubic"}, "scale: got 'cubic', expected one of none, linear, network"),
        ("hedgehog", {"exact_keys": 4}, "exact-keys: got 4 without a window"),
        ("hedgehog", {"window": 4, "exact_keys": -1}, "exact-keys: got -1"),
        ("hedgehog", {"window": 4, "trained_length": 9}, "trained-length: got 9, expected a number of tokens"),
        ("hedgehog", {"window": 4, "scale": "linear", "trained_length": 0}, "trained-length: got 0"),
        ("hedgehog", {"softmax_heads": (4,)}, r"softmax-heads: got \[4\], expected numbers of heads from 0 to 3"),
        ("hedgehog", {"softmax_heads": (1, 1)}, "each once and in order"),
    ],
)
def test_additions_that_a_kernel_cannot_have(kernel, hybrid, message):
    arguments = {"form": "paper"} if kernel == "flexformer_n" else {}
    with pytest.raises(ConfigError, match=message):
        build_mixer(kernel, arguments, _shape(), Hybrid(**hybrid))


def test_kernels_without_a_denominator_take_no_window():
    refused = [info for info in kernel_infos() if not info.windowed and info.preset is None]
    assert refused
    for info in refused:
        with pytest.raises(ConfigError, match=f"kernel '{info.name}' takes no window"):
            build_mixer(info.name, {}, _shape(), Hybrid(8))


def test_a_preset_is_not_a_mixer():
    presets = [info for info in kernel_infos() if info.preset is not None]
    assert presets
    for info in presets:
        with pytest.raises(ConfigError, match="is a plan for all layers of a model"):
            build_mixer(info.name, {}, _shape())


def _shape():
    return HeadShape(4, 2, 8, 8, causal=True)
