"""Every kernel of the registry does what its facts say; nothing here knows a kernel by name."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import pytest
import torch
from support.kernel_cases import (
    BATCH,
    CASES,
    DIM,
    HEADS,
    IDS,
    KERNELS,
    KEY_HEADS,
    NAMES,
    decode,
    directions,
    make_inputs,
    make_mixer,
    naive,
    needed,
    run,
    stepwise,
)

import linearize.kernels
from linearize.attention.factory import build_mixer, count_parameters
from linearize.attention.feature_map import FeatureMapMixer
from linearize.core.registry import kernel_info, kernel_infos, make_config

TOKENS = 21
BOTH = [
    pytest.param(info, arguments, direction, id=f"{name}-{direction}")
    for (info, arguments), name in zip(CASES, IDS, strict=True)
    for direction in directions(info)
]
PLAIN = [
    pytest.param(info, direction, id=f"{info.name}-{direction}") for info in KERNELS for direction in directions(info)
]


def test_there_are_at_least_twenty():
    assert len(kernel_infos()) >= 20


def test_every_file_registers_something():
    before = {info.name for info in kernel_infos()}
    for module in pkgutil.iter_modules(linearize.kernels.__path__):
        if module.name.startswith("_") or module.name == "base":
            continue
        importlib.import_module(f"linearize.kernels.{module.name}")
        assert module.name in before, f"kernels/{module.name}.py registers no kernel of its name"


@pytest.mark.parametrize("info", kernel_infos(), ids=lambda info: info.name)
def test_facts_are_complete(info):
    assert info.summary and info.formula and info.source and info.parameters_formula
    assert info.url.startswith("https://arxiv.org/abs/")
    assert all(field.metadata["help"] for field in dataclasses.fields(info.config))
    config = make_config(info, needed(info))
    assert info.training(config).loss in ("weights", "output")
    assert info.normalized or info.training(config).loss == "output"
    assert set(info.legacy_defaults) <= {field.name for field in dataclasses.fields(info.config)}
    make_config(info, needed(info) | dict(info.legacy_defaults))
    assert info.feature_dim is None or info.feature_dim(config, 64) >= 1


@pytest.mark.parametrize(("info", "arguments"), CASES, ids=IDS)
def test_features(info, arguments):
    """Their number is the published one; a token alone has those that it has in a batch; keys' are queries' if said."""
    mixer = make_mixer(info, arguments, causal=info.causal)
    if info.feature_dim is None:
        assert not isinstance(mixer, FeatureMapMixer)
        return
    q, k, _ = make_inputs(TOKENS)
    (phi_q, _), (phi_k, log_scale) = whole = mixer.mapped(q, k, scaling=0.3)
    size = info.feature_dim(mixer.config, DIM)
    assert phi_q.shape == (BATCH, HEADS, TOKENS, size)
    assert phi_k.shape == (BATCH, KEY_HEADS, TOKENS, size)
    assert log_scale is None or log_scale.shape == (BATCH, KEY_HEADS, TOKENS)
    assert phi_q.dtype == phi_k.dtype == torch.float32
    one, two = mixer.keys.forward_keys(k), mixer.keys.forward_queries(k)
    assert torch.equal(one.phi, two.phi) == mixer.keys.symmetric
    if not info.positional:
        single = mixer.mapped(q[:1, :, 4:5], k[:1, :, 4:5], scaling=0.3)
        for many, one in zip([*whole[0], *whole[1]], [*single[0], *single[1]], strict=True):
            if many is not None:
                torch.testing.assert_close(one, many[:1, :, 4:5], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("info", "arguments"), CASES, ids=IDS)
def test_parameters_and_buffers(info, arguments):
    """They are as many as the facts say, the same for one seed, and of the same sizes on the meta device."""
    before = torch.get_rng_state()
    mixer, twin = (make_mixer(info, arguments, causal=info.causal, seed=3) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    parameters, tensors = list(mixer.parameters()), mixer.state_dict()
    assert sum(p.numel() for p in parameters) == count_parameters(info.name, arguments, mixer.shape)
    assert bool(parameters) == info.is_learnable(mixer.config)
    # Random numbers that are not learned are saved, whatever their shape.
    assert set(tensors) == {name for name, _ in [*mixer.named_parameters(), *mixer.named_buffers()]}
    with torch.device("meta"):
        empty = build_mixer(info.name, arguments, mixer.shape).state_dict()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32 and tensor.shape[0] in (HEADS, KEY_HEADS, 1), name
        assert torch.isfinite(tensor).all() and torch.equal(tensor, twin.state_dict()[name]), name
        assert empty[name].is_meta and empty[name].shape == tensor.shape, name
    if info.random:
        other = make_mixer(info, arguments, causal=info.causal, seed=4).state_dict()
        assert list(mixer.buffers()) and any(not torch.equal(tensor, other[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize(("info", "arguments", "direction"), BOTH)
def test_weights_are_what_the_facts_say(info, arguments, direction):
    mixer = make_mixer(info, arguments, causal=direction == "causal")
    q, k, _ = make_inputs(TOKENS)
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    mask[0, -4:] = False
    weights = mixer.weights(q, k, scaling=DIM**-0.5, key_padding_mask=mask)
    assert weights.shape == (BATCH, HEADS, TOKENS, TOKENS)
    assert weights.dtype == torch.float32
    assert (weights[0, ..., -4:] == 0).all()
    if direction == "causal":
        assert (weights.triu(1) == 0).all()
    if info.normalized and getattr(mixer, "floor", 0.0):
        # Where the floor is met, a row adds up to less than one, of either sign.
        assert (weights.sum(-1).abs() <= 1 + 1e-4).all()
        assert (weights.abs().sum(-1) <= 1 / mixer.floor + 1e-4).all()
    elif info.normalized:
        # Rows of padded queries do not matter: padding is mapped like zeros, and some maps have no feature for those.
        sums = weights.sum(-1).transpose(1, 2)[mask]
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-4, atol=1e-4)
    if mixer.positive:
        large, small, _ = make_inputs(TOKENS, scale=4.0)
        for pair in ((q, k), (large, small)):
            assert (mixer.weights(*pair, scaling=DIM**-0.5) >= 0).all()


def gradients(out, mixer, inputs):
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    leaves = [*inputs, *mixer.parameters()]
    # Every parameter is used, except those of a positive factor of a separate query map, which cancels.
    idle = not getattr(mixer.config, "tied", True)
    return torch.autograd.grad((out * weights).sum(), leaves, allow_unused=idle, materialize_grads=idle)


@pytest.mark.parametrize(("info", "arguments", "direction"), BOTH)
def test_fast_equals_naive_forward_and_gradients(info, arguments, direction):
    mixer = make_mixer(info, arguments, causal=direction == "causal")
    inputs = [x.requires_grad_() for x in make_inputs(TOKENS)]
    fast, _ = run(mixer, *inputs)
    reference = naive(mixer, *inputs)
    torch.testing.assert_close(fast, reference, rtol=1e-3, atol=1e-4)
    for got, want in zip(gradients(fast, mixer, inputs), gradients(reference, mixer, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize(("info", "arguments"), CASES, ids=IDS)
@pytest.mark.parametrize("prefill", [0, 7])
@pytest.mark.sampled("values", "info", "prefill")
def test_step_by_step_equals_at_once(info, arguments, prefill):
    if not (info.causal and info.streamable):
        pytest.skip("the kernel says that it does not stream")
    mixer = make_mixer(info, arguments, causal=True)
    inputs = [x.requires_grad_() for x in make_inputs(TOKENS)]
    whole, _ = run(mixer, *inputs)
    steps, _ = stepwise(mixer, *inputs, prefill=prefill)
    torch.testing.assert_close(steps, whole, rtol=1e-3, atol=1e-4)
    if info.is_learnable(mixer.config):
        for got, want in zip(gradients(steps, mixer, inputs), gradients(whole, mixer, inputs), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("name", NAMES)
def test_the_state_does_not_grow(name):
    info = kernel_info(name)
    mixer = make_mixer(info, causal=True)

    def size(tokens):
        _, state = run(mixer, *make_inputs(tokens), needs_state=True)
        assert all(tensor.shape[0] == BATCH for tensor in state.values())
        return sum(tensor.numel() for tensor in state.values())

    assert size(5) == size(50)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("info", "direction"), PLAIN)
def test_padding_changes_nothing(info, direction, side):
    mixer = make_mixer(info, causal=direction == "causal")
    q, k, v = make_inputs(TOKENS)
    alone, _ = run(mixer, q, k, v)
    extra = 5
    noise = [x * 9.0 for x in make_inputs(extra, seed=1)]
    pair = (lambda x, n: (n, x)) if side == "left" else (lambda x, n: (x, n))
    padded = [torch.cat(pair(x, n), dim=2) for x, n in zip((q, k, v), noise, strict=True)]
    mask = torch.ones(BATCH, TOKENS + extra)
    real = slice(extra, None) if side == "left" else slice(0, TOKENS)
    mask[:] = 0
    mask[:, real] = 1
    out, _ = run(mixer, *padded, mask)
    scale = alone.norm()
    assert (out[:, :, real] - alone).norm() <= 1e-4 * scale
    reference = naive(mixer, *padded, mask)
    assert (reference[:, :, real] - alone).norm() <= 1e-3 * scale


@pytest.mark.parametrize("name", NAMES)
def test_decoding_goes_on_after_padding(name):
    """A left-padded batch is read, then continued token by token."""
    info = kernel_info(name)
    mixer = make_mixer(info, causal=True)
    q, k, v = make_inputs(TOKENS)
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    mask[0, :6] = False
    whole, _ = run(mixer, q, k, v, mask)
    steps, _ = stepwise(mixer, q, k, v, mask, prefill=10)
    torch.testing.assert_close(steps[:, :, 10:], whole[:, :, 10:], rtol=1e-3, atol=1e-4)
    alone, _ = run(mixer, q[:1, :, 6:], k[:1, :, 6:], v[:1, :, 6:])
    assert (whole[:1, :, 6:] - alone).norm() <= 1e-4 * alone.norm()


@pytest.mark.parametrize("name", NAMES)
def test_no_future_token_changes_an_earlier_output(name):
    info = kernel_info(name)
    mixer = make_mixer(info, causal=True)
    q, k, v = make_inputs(90)
    early, _ = run(mixer, q, k, v)
    later = [torch.cat([x[:, :, :50], 40.0 * x[:, :, 50:].flip(2)], dim=2) for x in (q, k, v)]
    changed, _ = run(mixer, *later)
    torch.testing.assert_close(changed[:, :, :50], early[:, :, :50], rtol=0, atol=1e-6)
    assert not torch.equal(changed[:, :, 50:], early[:, :, 50:])


@pytest.mark.sampled("values", "info")
@pytest.mark.parametrize(("info", "arguments"), CASES, ids=IDS)
def test_decoding_in_place_equals_the_plain_step(info, arguments):
    """Decoding in the state's memory equals decoding with a gradient."""
    if not info.causal:
        pytest.skip("bidirectional only")
    mixer = make_mixer(info, arguments, causal=True)
    q, k, v = make_inputs(40)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, 20:25] = False
    with torch.no_grad():
        _, plain = run(mixer, q[:, :, :9], k[:, :, :9], v[:, :, :9], mask[:, :9], needs_state=True)
        given = {name: tensor.clone() for name, tensor in plain.items()}
        for i in range(9, 40):
            one = [x[:, :, i : i + 1] for x in (q, k, v)]
            with torch.enable_grad():
                want, plain = run(mixer, *one, mask[:, i : i + 1], state=plain, needs_state=True)
            want, plain = want.detach(), {name: tensor.detach() for name, tensor in plain.items()}
            got, given = decode(mixer, *one, mask[:, i : i + 1], state=given)
            size = max(1.0, want.abs().max().item())
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * size)
