"""Run the native op under the address and undefined-behaviour sanitizers: `make sanitize`.

Compiles it into build/sanitize, starts itself again with the sanitizer loaded first, and calls every map, forward,
backward and decoding, at sizes around those of vectors and tiles. The first error ends it, with the sanitizer's report.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from linearize.attention.call import AttentionCall
    from linearize.attention.mixer import Mixer

CHECKOUT = Path(__file__).parents[2]
FOLDER = CHECKOUT / "build" / "sanitize"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g")
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
"""Leaks: Python itself never frees much of what it holds at its end."""

TOKENS = (1, 2, 47, 48, 49, 100)
SIZES = ((1, 1), (3, 2), (20, 24), (33, 65))
"""Sizes of heads and of values."""
WINDOWS = (
    *({"window": 5, "sinks": 3}, {"window": 5, "sinks": 3, "exact_keys": 4}, {"window": 60, "exact_keys": 60}),
    {"window": 9, "sinks": 3, "routed_blocks": "2:3"},
    {"window": 4, "routed_blocks": "9"},
    {"window": 4, "sinks": 1, "routed_blocks": "3:2", "routed_heads": (1,)},
)


def compiled() -> Path:
    """Compile as `linearize native --build` does, at a lower level of optimisation and with the sanitizers."""
    from linearize.attention.native.build import compiler
    from linearize.attention.native.locate import FLAGS, NATIVE_FLAGS, SOURCES

    program = compiler()
    if program is None:
        raise SystemExit("sanitize: got no C compiler, expected gcc; install it or set CC")
    FOLDER.mkdir(parents=True, exist_ok=True)
    source = CHECKOUT / "linearize" / "attention" / "native" / SOURCES[0]
    unit, library = FOLDER / "native.o", FOLDER / "native.so"
    flags = ["-O1" if flag == "-O3" else flag for flag in (*FLAGS, *NATIVE_FLAGS)]
    subprocess.run([program, *flags, *SANITIZERS, "-fopenmp", "-c", str(source), "-o", str(unit)], check=True)
    subprocess.run([program, *SANITIZERS, "-shared", str(unit), "-lm", "-o", str(library)], check=True)
    return library


def preloaded() -> str:
    """Return the libraries that have to be there before Python's own."""
    from linearize.attention.native.build import compiler

    found = []
    for name in ("libasan.so", "libstdc++.so"):
        asked = [str(compiler()), f"-print-file-name={name}"]
        path = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        if not os.path.isabs(path):
            raise SystemExit(f"sanitize: the compiler has no {name}, expected gcc with its sanitizers; set CC=gcc")
        found.append(os.path.realpath(path))
    return " ".join(found)


def hybrid(number: int, positive: bool) -> dict[str, object]:
    """Choose one of the windows, and scales for maps that take them."""
    return WINDOWS[number % len(WINDOWS)] | {"scale": ("linear", "network")[number % 2] if positive else "none"}


def behind_window(mixer: Mixer, call: AttentionCall, token: Sequence[Tensor], mask: Tensor | None) -> None:
    """Attend with a window, with and without a gradient, and, causally, decode some tokens."""
    import torch

    causal = mixer.shape.causal
    with torch.enable_grad():
        out, _ = mixer(call)
        torch.autograd.grad(out.float().sum(), [call.q, call.k, call.v, *mixer.parameters()], allow_unused=True)
    _, state = mixer(dataclasses.replace(call, needs_state=causal))
    q, k, v = token
    step = dataclasses.replace(call, q=q, k=k, v=v, key_padding_mask=mask, state=state, needs_state=True)
    for _ in range(3 * causal):
        mixer(step)


def run() -> int:
    """Call everything there is; returns how many calls that were."""
    import torch

    import linearize.attention.native as native
    from linearize.attention.native.calls import Engine

    engine, calls = Engine(FOLDER / "native.so"), 0
    # Before anything imports it.
    native.loaded = lambda: engine
    from support.native_cases import CASES, learned

    from linearize.attention.backends.causal import attend_causally, attend_with_state
    from linearize.attention.call import AttentionCall

    def inputs(count, size, value, key_heads, dtype):
        shapes = ((4, size), (key_heads, size), (key_heads, value))
        return [torch.randn(2, count, n, d).to(dtype).transpose(1, 2) for n, d in shapes]

    def masks(count):
        some = torch.rand(2, count) > 0.3
        some[0] = False
        return None, some

    for (name, args), causal, key_heads in itertools.product(CASES, (False, True), (2, 4)):
        for number, (size, value) in enumerate(SIZES):
            dtype = (torch.float32, torch.bfloat16)[(number + key_heads // 2) % 2]
            mixer = learned(name, args, causal=causal, key_heads=key_heads, size=size, value=value)
            for count in TOKENS:
                mask = masks(count)[count % 2]
                torch.set_num_threads(1 + count % 2)
                leaves = [x.requires_grad_() for x in inputs(count, size, value, key_heads, dtype)]
                call = AttentionCall(*leaves, size**-0.5, mask)
                out, _ = mixer(call)
                torch.autograd.grad(out.float().sum(), [*leaves, *mixer.parameters()], allow_unused=True)
                torch.autograd.grad(mixer.mapped(*leaves[:2], scaling=1.0)[0].phi.sum(), leaves[0])
                with torch.no_grad():
                    _, state = mixer(dataclasses.replace(call, needs_state=causal))
                    if causal:
                        _, state = mixer(dataclasses.replace(call, state=state, needs_state=True))
                        token = inputs(1, size, value, key_heads, dtype)
                        mixer(AttentionCall(*token, 1.0, masks(1)[count % 2], state=state, needs_state=True))
                    sizes = {"key_heads": key_heads, "size": size, "value": value}
                    windowed = learned(name, args, causal=causal, **sizes, **hybrid(count + number, mixer.positive))
                    behind_window(windowed, call, inputs(1, size, value, key_heads, dtype), masks(1)[count % 2])
                calls += 7 + 5 * causal
        print(f"{name} {args} {'causal' if causal else 'bidirectional'}: {calls} calls", flush=True)
    for count, climb, mask in itertools.product(TOKENS, (None, 3.0, 600.0), (False, True)):
        scale = None if climb is None else torch.linspace(-climb, climb, count).expand(2, 2, count).clone()
        given = [torch.rand(2, n, count, d) for n, d in ((4, 33), (2, 33), (2, 5))]
        leaves = [x.requires_grad_() for x in (*given, scale) if x is not None]
        more = {"key_padding_mask": masks(count)[mask], "log_scale": None if scale is None else leaves[3]}
        torch.autograd.grad(attend_causally(*leaves[:3], **more).sum(), leaves)
        with torch.no_grad():
            _, state = attend_with_state(*leaves[:3], **more)
            attend_with_state(*leaves[:3], **more, initial_state=state)
        calls += 4
    print(f"no complaint in {calls} calls")
    return calls


def main() -> int:
    """Compile and start again under the sanitizer, or, started so, run."""
    if os.environ.get("LINEARIZE_SANITIZED"):
        return 0 if run() else 1
    compiled()
    environment = os.environ | OPTIONS | {"LD_PRELOAD": preloaded(), "LINEARIZE_SANITIZED": "1"}
    environment |= {"LINEARIZE_NATIVE": "1"}
    return subprocess.run([sys.executable, __file__], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
