"""The causal op through flash-linear-attention: its inputs and our use of its output, compared with the naive op.

Without a GPU a stand-in takes the kernel's place: a loop over tokens that does what its documentation says.
"""

import sys
import types

import pytest
import torch
from support.naive import naive_attention
from support.op_cases import gradients, make

from linearize.attention.backends import fla
from linearize.attention.backends.fla import fla_attention

GPU = torch.device("cuda")


def stand_in(q, k, v, g=None, scale=None, initial_state=None, output_final_state=False):
    """Simple gated linear attention, token by token: all [B, T, H, ...], the state [B, H, K, V] in fp32."""
    for x in (q, k, v, initial_state, *([] if g is None else [g])):
        assert x.dtype == torch.float32 and x.is_contiguous()
    assert output_final_state and q.shape[:3] == k.shape[:3] == v.shape[:3]
    state, rows = initial_state, []
    for t in range(q.shape[1]):
        if g is not None:
            assert (g <= 0).all()
            state = state * g[:, t, :, None, None].exp()
        state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(rows, dim=1), state


@pytest.fixture
def through(monkeypatch):
    calls = []

    def kernel(*args, **options):
        calls.append(args)
        return stand_in(*args, **options)

    monkeypatch.setattr(fla, "chunk_kernel", lambda device: kernel)
    return calls


@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "sums"])
@pytest.mark.parametrize("scaled", [False, True, "steep"])
@pytest.mark.parametrize("padded", [None, "left", "right"])
def test_equals_naive(through, padded, scaled, normalize):
    tokens = 70
    phi_q, phi_k, v, scale, mask = make(tokens, scaled=bool(scaled), padded=padded)
    if scaled == "steep":
        with torch.no_grad():
            scale += torch.linspace(0, 700, tokens)
    options = {"key_padding_mask": mask, "log_scale": scale, "normalize": normalize}
    out, state = fla_attention(phi_q, phi_k, v, **options)
    assert len(through) == 1
    expected, expected_state = naive_attention(phi_q, phi_k, v, causal=True, **options)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.log_scale, expected_state.log_scale)
    torch.testing.assert_close(state.kv, expected_state.kv, rtol=1e-4, atol=1e-5)
    leaves = [x for x in (phi_q, phi_k, v, scale) if x is not None]
    for found, wanted in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_padding_may_hold_anything(through, scaled):
    phi_q, phi_k, v, scale, mask = make(70, scaled=scaled, padded="left")
    holes = ~mask[:, None].bool()
    found = []
    for value in (0.0, float("nan")):
        given = [x.masked_fill(holes[..., None], value) for x in (phi_k, v)]
        scales = None if scale is None else scale.masked_fill(holes, value)
        out, _ = fla_attention(phi_q, *given, key_padding_mask=mask, log_scale=scales)
        found.append([out, *gradients(out, [x for x in (phi_q, phi_k, v, scale) if x is not None])])
    for one, other in zip(*found, strict=True):
        assert torch.isfinite(other).all() and torch.equal(one, other)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_goes_on_from_a_state(through, scaled):
    phi_q, phi_k, v, scale, mask = make(50, scaled=scaled, padded="left")
    whole, _ = naive_attention(phi_q, phi_k, v, causal=True, key_padding_mask=mask, log_scale=scale)
    state, parts = None, []
    for part in (slice(0, 7), slice(7, 33), slice(33, None)):
        out, state = fla_attention(
            phi_q[:, :, part],
            phi_k[:, :, part],
            v[:, :, part],
            key_padding_mask=mask[:, part],
            log_scale=None if scale is None else scale[:, :, part],
            initial_state=state,
        )
        parts.append(out)
    assert len(through) == 3
    joined = torch.cat(parts, dim=2)
    torch.testing.assert_close(joined, whole, rtol=1e-4, atol=1e-5)
    leaves = [x for x in (phi_q, phi_k, v, scale) if x is not None]
    for found, wanted in zip(gradients(joined, leaves), gradients(whole, leaves), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


def test_values_in_half_precision_keep_their_type_and_fp32_sums(through):
    phi_q, phi_k, v, scale, _ = make(40, scaled=True)
    out, state = fla_attention(phi_q, phi_k, v.bfloat16(), log_scale=scale)
    expected, _ = naive_attention(phi_q, phi_k, v.bfloat16().float(), causal=True, log_scale=scale)
    assert out.dtype == torch.bfloat16 and state.kv.dtype == torch.float32
    torch.testing.assert_close(out, expected.bfloat16())


def test_taken_only_on_a_gpu_where_installed_and_not_switched_off(monkeypatch):
    module = types.ModuleType("fla.ops.simple_gla")
    module.chunk_simple_gla = stand_in
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    fla._kernel.cache_clear()
    try:
        assert fla.chunk_kernel(torch.device("cpu")) is None
        assert fla.chunk_kernel(GPU) is stand_in
        monkeypatch.setenv(fla.SWITCH, "0")
        assert fla.chunk_kernel(GPU) is None
        monkeypatch.delenv(fla.SWITCH)
        monkeypatch.setitem(sys.modules, module.__name__, None)
        fla._kernel.cache_clear()
        assert fla.chunk_kernel(GPU) is None
    finally:
        fla._kernel.cache_clear()


def test_fp32_values_only_where_products_may_be_tf32(monkeypatch):
    values = {dtype: torch.zeros(1, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)}
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision, taken in (("ieee", False), ("tf32", True)):
            torch.backends.cuda.matmul.fp32_precision = precision
            assert fla.exact_enough(values[torch.float32]) is taken
            assert fla.exact_enough(values[torch.bfloat16]) and not fla.exact_enough(values[torch.float64])
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_the_real_kernel_equals_naive(scaled):
    pytest.importorskip("fla.ops.simple_gla")
    phi_q, phi_k, v, scale, mask = make(1000, features=64, width=64, scaled=scaled, padded="right")
    here = [phi_q, phi_k, v.detach().bfloat16().requires_grad_(), *([scale] if scaled else [])]
    there = [x.detach().to(GPU).requires_grad_() for x in here]
    expected, _ = naive_attention(*here[:3], causal=True, key_padding_mask=mask, log_scale=scale)
    assert fla.chunk_kernel(GPU) is not None
    out, _ = fla_attention(*there[:3], key_padding_mask=mask.to(GPU), log_scale=there[3] if scaled else None)
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-2, atol=5e-3)
    for found, wanted in zip(gradients(out.float().cpu(), there), gradients(expected.float(), here), strict=True):
        error = (found.cpu().float() - wanted.float()).norm() / wanted.float().norm()
        assert error < 2e-2
