"""Time the block sizes of the Triton kernels on a GPU, and compare the fastest with SDPA.

    python scripts/tune_triton.py --tokens 32768 --output tuning.json
    python scripts/tune_triton.py --parts --output times.json

Every entry of `linearize.attention.backends.fused.TUNING` is changed alone, then the number of programs; `--parts`
names the entries to change, or none of them. The times are milliseconds per call of a CUDA graph with several calls, so
without the time that it takes to launch a call. Copy what is fastest into `TUNING` and `PROGRAMS`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from linearize.attention.backends import fused
from linearize.attention.backends.fused import TUNING, Tuning
from linearize.attention.backends.fused_window import FusedWindow
from linearize.attention.backends.triton_calls import absence
from linearize.attention.call import AttentionCall
from linearize.attention.factory import build_mixer
from linearize.attention.shape import HeadShape
from linearize.core.registry import Hybrid

CANDIDATES = [Tuning(block, warps, stages) for block in (16, 32, 64) for warps in (4, 8) for stages in (1, 2, 3)]
PARTS = {
    "sums": ("forward", False),
    "read": ("forward", False),
    "scan": ("forward", True),
    "gradients": ("backward", False),
    "causal_gradients": ("backward", True),
}
"""For each entry, the pass that uses it, and whether it is causal."""
PROGRAMS = (264, 528, 1056, 2112)
TURNS, CALLS = 5, 10
WINDOW = Hybrid(window=128, sinks=4, scale="linear")


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median milliseconds of a call in a CUDA graph, after one that compiles it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    for _ in range(TURNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return round(statistics.median(times), 4)


def passes(kernel: str, inputs: list[torch.Tensor], towards: torch.Tensor) -> dict[tuple[str, bool, str], Callable]:
    """Return the calls to time, by pass, direction and side."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    heads, size = inputs[0].shape[1], inputs[0].shape[3]
    found: dict[tuple[str, bool, str], Callable] = {}
    for causal in (False, True):
        mixer = build_mixer(kernel, {}, HeadShape(heads, heads, size, size, causal))
        near = build_mixer(kernel, {}, HeadShape(heads, heads, size, size, causal), WINDOW)
        for one in (mixer, near):
            one.reset_parameters(torch.Generator().manual_seed(0))
            one.cuda()

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixer: Any = mixer) -> torch.Tensor:
            return fused.Fused().run(mixer, AttentionCall(q, k, v, size**-0.5))[0]

        def window(mixer: Any = near) -> torch.Tensor:
            return FusedWindow().run(mixer, AttentionCall(*inputs, size**-0.5))[0]

        found["forward", causal, "window"] = torch.no_grad()(window)

        def softmax(*x: torch.Tensor, causal: bool = causal) -> torch.Tensor:
            return F.scaled_dot_product_attention(*x, is_causal=causal)

        for side, function, weights in (("linear", attend, list(mixer.parameters())), ("softmax", softmax, [])):
            found["forward", causal, side] = torch.no_grad()(lambda function=function: function(*inputs))
            found["backward", causal, side] = lambda function=function, weights=weights: torch.autograd.grad(
                function(*leaves), [*leaves, *weights], towards
            )
    return found


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="hedgehog")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="entries to change (all)")
    parser.add_argument("--output", help="JSON file")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    """Time all candidates and write the figures."""
    args = parse(words)
    if why := "there is no CUDA device" if not torch.cuda.is_available() else absence():
        sys.exit(f"{why}; run this on a machine with a GPU and Triton")
    shape = (1, args.tokens, args.heads, args.head_dim)
    *inputs, towards = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    calls = passes(args.kernel, inputs, towards)
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(), "tuning": []}
    for part in args.parts:
        (which, causal), times = PARTS[part], {}
        for candidate in CANDIDATES:
            TUNING[part] = candidate
            times[candidate] = milliseconds(calls[which, causal, "linear"])
            figures["tuning"].append({"part": part, **candidate._asdict(), "ms": times[candidate]})
            print(part, candidate, times[candidate], flush=True)
        TUNING[part] = min(times, key=lambda tuning: times[tuning])
    for causal in (False, True) if args.parts else ():
        sums = {}
        for number in PROGRAMS:
            fused.PROGRAMS[causal] = number
            found = [milliseconds(call) for (_, way, side), call in calls.items() if side == "linear" and way == causal]
            figures.setdefault("programs", []).append({"programs": number, "causal": causal, "ms": found})
            sums[number] = sum(found)
            print("programs", number, "causal" if causal else "bidirectional", found, flush=True)
        fused.PROGRAMS[causal] = min(sums, key=lambda number: sums[number])
    figures["best"] = {part: TUNING[part]._asdict() for part in PARTS} | {"programs": fused.PROGRAMS}
    figures["ms"] = {
        f"{which}, {'causal' if causal else 'bidirectional'}, {side}": milliseconds(call)
        for (which, causal, side), call in calls.items()
    }
    print(json.dumps({"best": figures["best"], "ms": figures["ms"]}, indent=1))
    if args.output:
        Path(args.output).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
