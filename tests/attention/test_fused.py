"""The Triton backend on the CPU, in Triton's interpreter, equals the eager one; and which calls it declines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.kernel_cases import make_inputs, make_mixer
from support.scripts import script

from linearize.attention.backends import fused, triton_calls
from linearize.attention.backends.choose import declined, kind_of
from linearize.attention.backends.eager import Eager
from linearize.attention.backends.fused_step import FusedStep
from linearize.attention.backends.fused_window import CHUNK, TUNING, FusedWindow
from linearize.attention.call import AttentionCall
from linearize.core.registry import kernel_info

TESTS = Path(__file__).parent.parent


def child(name, *words, **environment):
    """The output of a module of `support.children`, which has the Triton kernels to itself."""
    environment = os.environ | {"LINEARIZE_NATIVE": "0"} | environment
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, sys.path)])
    line = [sys.executable, "-m", f"support.children.{name}", *words]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("cases", ["few", pytest.param("more", marks=pytest.mark.slow)])
def test_outputs_states_and_gradients_equal_the_eager_backend(cases):
    found = json.loads(child("fused", cases, TRITON_INTERPRET="1"))
    assert len(found) >= 16
    for name, errors in found.items():
        # One rounding of the output to bf16 or fp16, and of the gradients.
        limit = 2e-2 if "bfloat16" in name else 1e-3 if "float16" in name else 1e-5
        assert {what: error for what, error in errors.items() if not error < limit} == {}, name


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_windows_and_steps_compile_for_an_h100():
    found = json.loads(child("compiled"))
    assert found.keys() == {"chunk_sums", "outside", "contest", "window_attend", "step", "advance"}
    assert max(found.values()) <= triton_calls.NEEDED[triton_calls.EXACT, False][0] * 1024


FUSED = fused.Fused()


def why_not(
    name="hedgehog",
    arguments=None,
    *,
    gradient=False,
    dtype=torch.bfloat16,
    dim=16,
    more=None,
    backend=FUSED,
    **options,
):
    """Why a backend declines a call; it takes the CPU for a GPU."""
    mixer = make_mixer(kernel_info(name), arguments, **{"causal": True, **options}, dim=dim)
    q, k, v = (x.to(dtype) for x in make_inputs(20, dim=dim))
    with torch.set_grad_enabled(gradient):
        return declined(backend, mixer, kind_of(mixer, AttentionCall(q, k, v, 0.25, **(more or {}))))


def test_it_declines_what_it_cannot_compute(monkeypatch):
    monkeypatch.delenv(triton_calls.SWITCH, raising=False)
    assert why_not() == "it runs only on CUDA"
    monkeypatch.setattr(triton_calls, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(triton_calls, "kernels", lambda: object())
    assert why_not() == why_not(gradient=True) == why_not("t2r") == why_not("flexformer_n") == ""
    assert why_not(causal=False, scale="linear") == why_not(more={"needs_state": True}) == ""
    assert "window" in why_not(window=4)
    assert "causal keys" in why_not(scale="linear")
    assert "feature map" in why_not("elu")
    assert "feature map" in why_not("hedgehog", {"activation": "exp"})
    assert "before or after" in why_not("cosformer")
    assert "states" in why_not(gradient=True, more={"needs_state": True})
    assert "plain tensors" in why_not(causal=False, dtype=torch.float64)
    assert "128" in why_not(dim=130)
    exact = {"causal": False, "dtype": torch.float32}
    assert why_not(**exact) == why_not(dim=80) == why_not("flexformer_n", **exact) == ""
    assert "exact" in why_not(dtype=torch.float32)
    assert "64" in why_not(**exact, dim=80)
    assert "shared memory" in why_not("flexformer_n", **exact, gradient=True)
    assert "shared memory" in why_not("flexformer_n", dim=80, gradient=True)
    monkeypatch.setattr(triton_calls, "kernels", lambda: None)
    assert why_not() == "Triton is not installed"
    monkeypatch.setenv(triton_calls.SWITCH, "0")
    assert why_not() == "LINEARIZE_TRITON is 0"


def test_a_compiled_kernel_is_used_again_only_for_arguments_of_the_same_kinds(monkeypatch):
    """All that Triton's choice of a compiled kernel depends on: types, alignment, numbers, options, absence."""
    launched = []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args: launched.append((grid, args[1:]))

    class Function:
        arg_names = ("x", "count", "BLOCK", "CAUSAL")

        def __getitem__(self, grid):
            def compile(*args, **options):
                launched.append("compiled")
                return Compiled()

            return compile

    monkeypatch.setattr(triton_calls, "kernels", lambda name: SimpleNamespace(one=Function()))
    monkeypatch.setattr(triton_calls, "_compiled", {})
    x = torch.zeros(9)

    def launch(x, count=5, **options):
        triton_calls.launch("some.one", (3,), (x, count), **{"BLOCK": 16, "CAUSAL": True, "num_warps": 4} | options)
        return launched.pop()

    assert launch(x) == "compiled" and launch(x) == launch(x + 1) == ((3, 1, 1), (5, 16, True))
    for other in (launch(x[1:]), launch(x.double()), launch(x, 6), launch(x, BLOCK=32), launch(x, num_warps=8)):
        assert other == "compiled"
    assert launch(x[1:]) == ((3, 1, 1), (5, 16, True)) and launch(x, 6) == ((3, 1, 1), (6, 16, True))
    assert launch(x, CAUSAL=False) == "compiled" and launch(x, None) == "compiled"


@pytest.mark.parametrize(
    ("capability", "room"), [((7, 5), 0), ((8, 0), 163), ((8, 9), 99), ((9, 0), 227), ((12, 0), 99)]
)
def test_a_gpu_must_have_the_shared_memory(capability, room, monkeypatch):
    """The forward kernel for fp32 needs 114,688 bytes; an RTX 4090 has 101,376, where Triton would raise an error."""
    triton_calls.shared_memory.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert triton_calls.shared_memory(torch.device("cuda:0")) == room
    monkeypatch.setattr(triton_calls, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(triton_calls, "kernels", lambda: object())
    monkeypatch.setattr(triton_calls, "shared_memory", lambda device: room)
    exact = {"causal": False, "dtype": torch.float32}
    found = {
        "bf16": why_not() == "", "bf16 gradient": why_not(gradient=True) == "", "large": why_not(dim=80) == "",
        "exact": why_not(**exact) == "", "exact gradient": why_not(**exact, gradient=True) == "",
    }  # fmt: skip
    known = {99: {"bf16", "bf16 gradient"}, 163: {"bf16", "bf16 gradient", "exact"}, 227: set(found)}
    assert {name for name, accepted in found.items() if accepted} == known.get(room, set())


def test_windows_and_steps_decline_what_they_cannot_compute(monkeypatch):
    monkeypatch.setattr(triton_calls, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(triton_calls, "kernels", lambda: object())
    windows = FusedWindow(), FusedStep()
    monkeypatch.delenv(triton_calls.SWITCH, raising=False)
    assert why_not(window=4, backend=windows[0]) == why_not(scale="linear", backend=windows[0]) == ""
    assert why_not(backend=windows[0]) == "the layer has no softmax window"
    assert "gradient" in why_not(window=4, gradient=True, backend=windows[0])
    assert "exact keys" in why_not(window=4, exact_keys=2, dtype=torch.float32, backend=windows[0])
    assert why_not(window=4, exact_keys=2, causal=False, dtype=torch.float32, backend=windows[0]) == ""
    assert "not a decoding step" in why_not(window=4, backend=windows[1])
    assert "more than 64" in why_not(window=4, dim=80, backend=windows[0])


@pytest.mark.parametrize(("heads", "dim", "reason"), [(4, 16, ""), (10, 16, "registers"), (4, 80, "more than 64")])
def test_decoding_steps_of_sizes_that_no_gpu_has_run_are_declined(heads, dim, reason, monkeypatch):
    monkeypatch.setattr(triton_calls, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(triton_calls, "kernels", lambda: object())
    monkeypatch.delenv(triton_calls.SWITCH, raising=False)
    mixer = make_mixer(kernel_info("hedgehog"), causal=True, heads=heads, dim=dim)
    tokens = [x.bfloat16() for x in make_inputs(1, heads=heads, dim=dim)]
    with torch.no_grad():
        state = Eager().run(mixer, AttentionCall(*tokens, 0.25, needs_state=True))[1]
        why = FusedStep().why_not(mixer, kind_of(mixer, AttentionCall(*tokens, 0.25, state=state, needs_state=True)))
    assert reason in why and bool(reason) == bool(why)


def test_blocks_divide_the_segments_whatever_their_length():
    """Otherwise the last tokens of a segment would be left out."""
    for tuning in (*fused.TUNING.values(), *fused.TIGHT.values(), *script("tune_triton").CANDIDATES):
        assert fused.UNIT % tuning.block == 0 and fused.LEAST % fused.UNIT == 0
    for block, _, _, sums_tile, _ in TUNING.values():
        assert CHUNK % block == CHUNK % sums_tile == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_the_tuning_script_says_what_it_needs():
    with pytest.raises(SystemExit, match="no CUDA device"):
        script("tune_triton").main([])
