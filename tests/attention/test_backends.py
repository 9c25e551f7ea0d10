"""Which backend carries out which call: one ordered tuple, asked for prompts and decoding steps alike."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from rich.console import Console
from support.kernel_cases import KERNELS, make_inputs, make_mixer

from linearize.attention.backends import choose as choosing
from linearize.attention.backends.causal import NATIVE_OP, PYTORCH_OP, why_not_native
from linearize.attention.backends.choose import BACKENDS, choose, explain, kind_of
from linearize.attention.cache import LinearStateLayer
from linearize.attention.call import AttentionCall
from linearize.attention.layer import LinearAttention
from linearize.attention.shape import HeadShape
from linearize.cli.native import explain_layers
from linearize.core.registry import Hybrid, kernel_info

FEATURES = [info for info in KERNELS if info.feature_dim is not None]


def call(tokens=20, **more):
    return AttentionCall(*make_inputs(tokens), 0.25, **more)


def mixer_of(name, arguments=None, **options):
    return make_mixer(kernel_info(name), arguments, **options)


def state_of(mixer):
    with torch.no_grad():
        return mixer(call(needs_state=True))[1]


def name_of(mixer, one_call):
    """Name of the backend and, if it uses one, of its causal op."""
    backend = choose(mixer, one_call)
    if not backend.uses_op:
        return backend.name
    native = mixer.shape.causal and not why_not_native(one_call.k, normalize=mixer.divides)
    op = NATIVE_OP if native else PYTORCH_OP
    return f"{backend.name}, {op}"


def chosen(mixer, *, grad, **more):
    with torch.set_grad_enabled(grad):
        return name_of(mixer, call(**more))


def test_names_are_one_of_a_kind():
    assert len({*(one.name for one in BACKENDS), NATIVE_OP, PYTORCH_OP}) == len(BACKENDS) + 2


def test_in_pytorch():
    causal, both = (mixer_of("hedgehog", causal=causal) for causal in (True, False))
    for mixer in (causal, both):
        assert chosen(mixer, grad=False) == "streamed, pytorch"
        assert chosen(mixer, grad=True) == "eager, pytorch"
        assert chosen(mixer, grad=True, tokens=8192) == "streamed, pytorch"
        assert chosen(mixer, grad=False, tokens=1) == "eager, pytorch"
    assert chosen(causal, grad=True, tokens=8192, needs_state=True) == "streamed, pytorch"
    assert chosen(mixer_of("rfa", causal=True), grad=False) == "eager, pytorch"
    assert chosen(mixer_of("macformer_exp", causal=True), grad=False) == "eager, pytorch"
    assert chosen(mixer_of("hedgehog", causal=True, window=4), grad=False) == "window, pytorch"


def test_a_decoding_step_is_the_same_call_of_one_token():
    mixer = mixer_of("hedgehog", causal=True)
    state = state_of(mixer)
    assert chosen(mixer, grad=False, tokens=1, state=state, needs_state=True) == "one step"
    assert chosen(mixer, grad=True, tokens=1, state=state, needs_state=True) == "eager, pytorch"
    assert chosen(mixer, grad=False, tokens=2, state=state, needs_state=True) == "streamed, pytorch"
    windowed = mixer_of("hedgehog", causal=True, window=4)
    assert chosen(windowed, grad=False, tokens=1, state=state_of(windowed), needs_state=True) == "window, pytorch"


def test_natively(switch):
    causal, both = (mixer_of("hedgehog", causal=causal) for causal in (True, False))
    for mixer in (causal, both):
        assert chosen(mixer, grad=False) == chosen(mixer, grad=True) == "native"
    step = {"tokens": 1, "state": state_of(causal), "needs_state": True}
    assert chosen(causal, grad=False, **step) == "native"
    # Through states, the ops in PyTorch know the gradient.
    assert chosen(causal, grad=True, needs_state=True) == "eager, native causal op"
    assert chosen(mixer_of("elu", causal=True), grad=False) == "streamed, native causal op"
    assert chosen(mixer_of("elu", causal=False), grad=False) == "streamed, pytorch"
    assert chosen(mixer_of("rfa", causal=True), grad=False) == "eager, pytorch"
    assert chosen(mixer_of("rfa", {"floor": 0.0}, causal=True), grad=False) == "streamed, native causal op"
    windowed = mixer_of("hedgehog", causal=True, window=4)
    assert chosen(windowed, grad=False) == chosen(windowed, grad=False, needs_state=True) == "native"
    assert chosen(windowed, grad=True) == "native"
    assert chosen(windowed, grad=True, needs_state=True) == "window, pytorch"
    assert chosen(windowed, grad=False, state=state_of(windowed), needs_state=True) == "window, pytorch"
    step = {"tokens": 1, "state": state_of(windowed), "needs_state": True}
    assert chosen(windowed, grad=False, **step) == "native"
    assert chosen(windowed, grad=True, **step) == "window, pytorch"
    assert chosen(mixer_of("hedgehog", causal=False, window=4), grad=False) == "native"
    assert chosen(mixer_of("elu", causal=True, window=4), grad=False) == "window, pytorch"
    switch(False)
    assert chosen(causal, grad=False) == "streamed, pytorch"


@pytest.mark.parametrize("window", [None, 4])
def test_a_remembered_choice_is_that_of_a_fresh_layer(window, switch):
    """All facts that a backend reads are in the kind of a call: else a layer would keep the choice of another kind."""
    shared = mixer_of("hedgehog", causal=True, **({} if window is None else {"window": window}))
    state = state_of(shared)
    strided = {name: x.mT.contiguous().mT if x.ndim == 4 else x for name, x in state.items()}
    step = {"tokens": 1, "needs_state": True}
    calls = [{}, {"tokens": 1}, {"tokens": 8192}, {"needs_state": True}]
    calls += [{**step, "state": state}, {**step, "state": strided}, {"tokens": 2, "needs_state": True, "state": state}]
    names = set()
    for on, grad, dtype, more in itertools.product((True, False), (False, True), (torch.float32, torch.float16), calls):
        switch(on)
        one = call(**more)
        one.q, one.k, one.v = (x.to(dtype) for x in (one.q, one.k, one.v))
        with torch.set_grad_enabled(grad):
            backend = choose(shared, one)
            assert backend is choose(copy.deepcopy(shared), one), (on, grad, dtype, more.keys())
            assert backend is choose(shared, one)
        names.add(backend.name)
    assert names == ({"native", "one step", "streamed", "eager"} if window is None else {"native", "window"})


@pytest.mark.parametrize("info", FEATURES, ids=lambda info: info.name)
def test_the_last_ones_take_every_call(info, monkeypatch):
    """Without the quick ways every call is carried out all the same."""
    mixer = make_mixer(info, causal=info.causal)
    inputs = call()
    want, _ = mixer(inputs)
    monkeypatch.setattr(choosing, "BACKENDS", BACKENDS[-3:])
    mixer.memory.clear()
    got, _ = mixer(inputs)
    torch.testing.assert_close(got, want)
    assert BACKENDS[-1].why_not(mixer, kind_of(mixer, inputs)) == ""


@pytest.mark.parametrize("info", KERNELS, ids=lambda info: info.name)
def test_an_explanation_names_the_backend_that_runs(info):
    mixer = make_mixer(info, causal=info.causal)
    found = explain(mixer, 20)
    if info.feature_dim is None:
        assert [declined for _, _, declined in found] == [()]
        return
    backends = [one.name for one in BACKENDS]
    ops = [NATIVE_OP, PYTORCH_OP] if info.causal else [PYTORCH_OP]
    for _, chain, declined in found:
        backend, _, op = chain.partition(", ")
        before = backends[: backends.index(backend)] + (ops[: ops.index(op)] if op else [])
        assert [name for name, _ in declined] == before
        assert all(why for _, why in declined)
    if not info.positional:
        assert [chain for _, chain, _ in found[:2]] == [chosen(mixer, grad=grad) for grad in (False, True)]
    assert len(found) == 2 + (info.causal and info.streamable)


def test_equal_layers_are_explained_together():
    mixers = [mixer_of("hedgehog", causal=True), mixer_of("hedgehog", causal=True, window=4)]
    out = io.StringIO()
    explain_layers(Console(file=out), {str(n): mixers[n == 3] for n in (0, 1, 2, 3, 5)}, 20, "cpu")
    lines = out.getvalue().splitlines()
    assert [line for line in lines if line.startswith("Backends")] == [
        "Backends of layers 0-2, 5, hedgehog:",
        "Backends of layer 3, hedgehog:",
    ]
    assert "  20 tokens: streamed, pytorch" in lines and "  20 tokens: window, pytorch" in lines
    assert any(line.startswith("    declined, the call is not a decoding step: one step") for line in lines)


@pytest.mark.parametrize(
    "kernel, hybrid", [("hedgehog", {}), ("hedgehog", {"window": 4, "sinks": 1}), ("diag_rela", {})]
)
@pytest.mark.parametrize("rows, tokens", [(0, 5), (2, 0)])
def test_no_rows_or_no_tokens_leave_the_state_alone(kernel, hybrid, rows, tokens):
    layer, state = LinearAttention(kernel, {}, HeadShape(2, 2, 8, 8, True), Hybrid(**hybrid)), LinearStateLayer()
    layer.reset_parameters(0)
    empty, mask = torch.zeros(rows, 2, tokens, 8), torch.ones(rows, tokens, dtype=torch.bool)
    for _ in range(2):
        state.update(empty, empty)
        layer.hand_over(state)
        assert layer(empty, empty, empty, mask, 0.25).shape == empty.shape
        assert state.state is None
