"""Measure what a layer sends to other processes when each has a part of a long row, and how far it is from the whole.

    torchrun --nproc_per_node 2 scripts/context_parallel.py --output context-parallel.json

The layer has the size of one of SmolLM2-135M: 9 query heads, 3 key heads of 64, hedgehog. The first process writes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist

from linearize.attention.call import AttentionCall
from linearize.attention.factory import build_mixer
from linearize.attention.shape import HeadShape
from linearize.core.registry import Hybrid
from linearize.modeling.context_parallel import ContextParallel

HYBRIDS = {
    "kernel": Hybrid(),
    "window of 128 and 4 sinks": Hybrid(window=128, sinks=4, scale="linear"),
}


@torch.no_grad()
def measure(tokens: int, causal: bool, hybrid: Hybrid) -> dict[str, float]:
    """Return the bytes that this process sends for one layer, and the largest deviation of its part of the output."""
    mixer = build_mixer("hedgehog", {}, HeadShape(9, 3, 64, 64, causal), hybrid)
    mixer.reset_parameters(torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, tokens, 64, generator=draw) for heads in (9, 3, 3))
    parallel = ContextParallel()
    whole = mixer(AttentionCall(q, k, v, 0.125))[0].tensor_split(parallel.size, dim=2)[parallel.rank]
    own = [x.tensor_split(parallel.size, dim=2)[parallel.rank] for x in (q, k, v)]
    out = parallel.attend(mixer, AttentionCall(own[0], own[1], own[2], 0.125))[0]
    off = (out - whole).abs().max()
    dist.all_reduce(off, dist.ReduceOp.MAX)
    return {"bytes": parallel.sent, "largest_deviation": float(off), "largest_output": float(whole.abs().max())}


def main() -> None:
    """Measure all lengths and forms, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4_096, 32_768], help="lengths of the row")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the figures")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rows = [
        {"tokens": tokens, "causal": causal, "layer": name, **measure(tokens, causal, hybrid)}
        for tokens in arguments.tokens
        for causal in (True, False)
        for name, hybrid in HYBRIDS.items()
    ]
    if dist.get_rank() == 0:
        found = {"processes": dist.get_world_size(), "rows": rows}
        arguments.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
