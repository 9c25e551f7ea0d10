"""Every kernel at unusual sizes and numbers: natively and in PyTorch, forward, backward, decoding."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch
from support.kernel_cases import DIM, KERNELS, decode, make_inputs, make_mixer, run
from support.numerics_cases import ENGINES, MIXERS
from support.rounding import allowed, deviation, gradients_in_double

from linearize.attention.native.build import native_kernels
from linearize.core.registry import kernel_info

CAUSAL = [pytest.param(info, id=info.name) for info in KERNELS if info.causal and info.streamable]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def spread(tokens, limit, dtype, **sizes):
    """Numbers up to `limit`, with runs of the limit itself on both sides; values are ordinary."""
    q, k, v = make_inputs(tokens, **sizes)
    q, k = (x.clamp(-3, 3) * (limit / 3) for x in (q, k))
    q[..., : tokens // 4, :] = limit
    k[..., tokens // 2 :, ::2] = -limit
    k[..., : tokens // 8, :] = limit
    return [x.to(dtype) for x in (q, k, v)]


def finite(mixer, inputs, mask=None):
    """Outputs, states and gradients of a call are finite."""
    leaves = [x.requires_grad_() for x in inputs]
    out, _ = run(mixer, *leaves, mask)
    assert out.dtype == inputs[2].dtype and torch.isfinite(out).all()
    found = torch.autograd.grad(out.float().mean(), [*leaves, *mixer.parameters()], allow_unused=True)
    assert all(torch.isfinite(x).all() for x in found if x is not None)
    with torch.no_grad():
        out, state = run(mixer, *inputs, mask, needs_state=mixer.shape.causal)
    assert torch.isfinite(out).all() and all(torch.isfinite(x).all() for x in (state or {}).values())


@ENGINES
@pytest.mark.parametrize("limit", [60.0, 10_000.0])
@pytest.mark.parametrize(("info", "arguments", "direction", "window"), MIXERS)
@pytest.mark.sampled("pairs")
def test_large_numbers(switch, info, arguments, direction, window, limit, native):
    switch(native)
    mixer = make_mixer(info, arguments, causal=direction == "causal", window=window)
    for dtype in DTYPES:
        finite(mixer, spread(70, limit, dtype))


@ENGINES
@pytest.mark.parametrize(("info", "arguments", "direction", "window"), MIXERS)
@pytest.mark.sampled("pairs")
def test_few_tokens_and_none(switch, info, arguments, direction, window, native):
    """One token, two, and rows in which all are padding."""
    switch(native)
    mixer = make_mixer(info, arguments, causal=direction == "causal", window=window)
    for tokens in (1, 2):
        for dtype in DTYPES:
            finite(mixer, [x.to(dtype) for x in make_inputs(tokens)])
        mask = torch.ones(2, tokens, dtype=torch.bool)
        mask[1] = False
        finite(mixer, make_inputs(tokens), mask)
        with torch.no_grad():
            alone, _ = run(mixer, *make_inputs(tokens))
            beside, _ = run(mixer, *make_inputs(tokens), mask)
        torch.testing.assert_close(beside[0], alone[0])


@pytest.mark.slow
@ENGINES
@pytest.mark.parametrize(("info", "arguments", "direction", "window"), MIXERS)
def test_very_many_tokens(switch, info, arguments, direction, window, native):
    """65,537 tokens: one more than whole chunks and tiles."""
    switch(native)
    sizes = {"heads": 1, "key_heads": 1, "dim": 4, "width": 2}
    # Tables of positions are as long as the kernel is told.
    arguments = arguments | ({"max_positions": 65_537} if info.maximum_positions else {})
    mixer = make_mixer(info, arguments, causal=direction == "causal", window=window, **sizes)
    finite(mixer, spread(65_537, 3.0, torch.float32, batch=1, **sizes))


KINKED = ("luna", "t2r")
"""Kernels with relu in them: fp32 may fall on the other side of a kink, where the slope is another."""


def same_natively(switch, info, direction, size):
    """The native op and PyTorch are as exact at a head size as fp32 allows, forward and backward."""
    causal = direction == "causal"
    mixer = make_mixer(info, causal=causal, heads=2, key_heads=1, dim=size, width=size)
    tokens = 50
    inputs = make_inputs(tokens, batch=1, heads=2, key_heads=1, dim=size, width=size)
    towards = torch.linspace(-1, 1, 2 * tokens * size).reshape(1, 2, tokens, size)
    written_out = gradients_in_double(mixer, None, DIM**-0.5)
    # As in tests/native/test_gradients.py: two query heads and their keys, one batch entry.
    terms = size + mixer.feature_dim + size + 2 * tokens + 3 * tokens
    leaves = [*inputs, towards, *mixer.parameters()]
    exact, moves = deviation(written_out, leaves)
    bounds = [allowed(move, terms) for move in moves]
    if info.name in KINKED:
        # What the whole bound's worth of roundings does takes numbers over kinks, and their slopes with them.
        _, far = deviation(written_out, leaves, roundings=allowed(1.0, terms))
        bounds = [bound + jump for bound, jump in zip(bounds, far, strict=True)]
    for native in (True, False):
        switch(native)
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, _ = run(mixer, *leaves)
        found = [out, *torch.autograd.grad(out, [*leaves, *mixer.parameters()], towards)]
        for number, (ours, wanted, bound) in enumerate(zip(found, exact, bounds, strict=True)):
            assert (ours - wanted).abs().max().item() <= bound, (size, number, native)


@pytest.mark.parametrize("size", [1, 2, 17, 64, 256])
@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
@pytest.mark.parametrize("name", native_kernels())
@pytest.mark.sampled("pairs")
def test_head_sizes(switch, name, direction, size):
    same_natively(switch, kernel_info(name), direction, size)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
@pytest.mark.parametrize("name", native_kernels())
def test_all_head_sizes(switch, name, direction):
    for size in range(1, 257):
        same_natively(switch, kernel_info(name), direction, size)


@pytest.mark.slow
@pytest.mark.parametrize(("info", "arguments", "direction", "window"), MIXERS)
def test_all_head_sizes_in_pytorch(info, arguments, direction, window):
    for size in range(1, 257):
        if info.max_head_dim is None or size <= info.max_head_dim:
            mixer = make_mixer(info, arguments, causal=direction == "causal", window=window, dim=size, width=size)
            finite(mixer, make_inputs(9, dim=size, width=size))


def steps(info, count, native, switch):
    """Decode `count` tokens: the last outputs are those of all tokens at once, and the state is no larger or other."""
    switch(native)
    arguments = {"max_positions": count + 1} if info.maximum_positions else None
    sizes = {"heads": 2, "key_heads": 1, "dim": 8, "width": 4}
    mixer = make_mixer(info, arguments, causal=True, **sizes)
    q, k, v = make_inputs(count, batch=1, **sizes)
    with torch.no_grad():
        whole, after = run(mixer, q, k, v, needs_state=True)
        _, state = run(mixer, *(x[:, :, :1] for x in (q, k, v)), needs_state=True)
        size = sum(x.numel() for x in state.values())
        errors = []
        for i in range(1, count):
            token = [x[:, :, i : i + 1] for x in (q, k, v)]
            out, state = decode(mixer, *token, state=state)
            errors.append((out[:, :, 0] - whole[:, :, i]).abs().max())
    assert sum(x.numel() for x in state.values()) == size
    errors = torch.stack(errors)
    assert torch.isfinite(errors).all()
    # The median too: signed weights make single rows' rounding large, but no more so after many steps.
    assert errors.median() <= 1e-4 * whole.abs().median() + 1e-5
    assert errors[-count // 4 :].median() <= 20 * errors[: count // 4].median() + 1e-5
    for name, x in state.items():
        torch.testing.assert_close(x, after[name], rtol=1e-3, atol=1e-3 * max(1.0, after[name].abs().max().item()))


@ENGINES
@pytest.mark.parametrize("info", CAUSAL)
def test_decoding(switch, info, native):
    steps(info, 60, native, switch)


@pytest.mark.slow
@ENGINES
@pytest.mark.parametrize("info", CAUSAL)
def test_long_decoding(switch, info, native):
    steps(info, 10_000, native, switch)


@ENGINES
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("name", native_kernels())
def test_two_threads_at_once(switch, name, causal, native):
    switch(native)
    mixer = make_mixer(kernel_info(name), causal=causal)
    inputs = [make_inputs(90, seed=seed) for seed in range(2)]

    def call(seed):
        leaves = [x.clone().requires_grad_() for x in inputs[seed]]
        out, _ = run(mixer, *leaves)
        return [out.detach(), *torch.autograd.grad(out.sum(), [*leaves, *mixer.parameters()])]

    expected, found = [call(seed) for seed in range(2)], [[], []]

    def many(seed):
        for _ in range(5):
            found[seed].append(call(seed))

    threads = [threading.Thread(target=many, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(2):
        assert len(found[seed]) == 5
        for one in found[seed]:
            assert all(torch.equal(x, y) for x, y in zip(one, expected[seed], strict=True))


def _forked(mixer, inputs, expected, done):
    with torch.no_grad():
        out, _ = run(mixer, *inputs)
        torch.randn(600, 600).exp() @ torch.ones(600, 600)
    done.put((torch.get_num_threads(), bool((out - expected).abs().max() <= 1e-5)))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork")
@ENGINES
def test_after_a_fork(switch, native):
    """The parent has used two threads; so does the child. scikit-learn brings another OpenMP library."""
    pytest.importorskip("sklearn.metrics")
    switch(native)
    mixer, inputs = make_mixer(kernel_info("hedgehog"), causal=True), make_inputs(90)
    before = torch.get_num_threads()
    context = multiprocessing.get_context("fork")
    done = context.Queue()
    try:
        torch.set_num_threads(2)
        with torch.no_grad():
            expected, _ = run(mixer, *inputs)
        child = context.Process(target=_forked, args=(mixer, inputs, expected, done), daemon=True)
        child.start()
    finally:
        torch.set_num_threads(before)
    try:
        assert done.get() == (2, True)
    finally:
        child.kill()
        child.join()
