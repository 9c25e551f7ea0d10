"""Attention layers on random inputs compared with softmax (SDPA): the bare op, and decoding through all layers.

python -m benchmarks.attentions op --causal --lengths 4096,16384 --no-memory
python -m benchmarks.attentions decode --kernel flexformer_n --kernel hedgehog --lengths 8192,32768
python -m benchmarks.attentions decode --layers 1 --window 128 --scale linear --routed-blocks 34
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.command import add_lengths, add_machine, add_memory, measure_suites, new_parser
from linearize.attention.backends.causal import attend_causally
from linearize.attention.call import AttentionCall
from linearize.core.errors import ConfigError
from linearize.core.registry import Hybrid
from linearize.evaluation.bench.job import checked
from linearize.evaluation.bench.meter import Call
from linearize.evaluation.bench.models import set_memory
from linearize.evaluation.bench.rows import Row
from linearize.evaluation.bench.suites import PREFILL, AttentionSizes, AttentionSuite, SizedSuite, Suite
from linearize.evaluation.options import BenchOptions, check_lengths
from linearize.ops import bidirectional_attention

SPARE = 16
"""Free places in the key cache after the context."""


@dataclass(frozen=True)
class OpSuite(AttentionSuite):
    """The bare op on given features, without a kernel's feature map.

    Attributes:
        features: number of features F.
    """

    features: int = 128

    @property
    def what(self) -> str:
        return f"given features of size {self.features}, {self.how}"

    def check(self) -> None:
        """Accept all sizes."""

    def prepare(self, variant: str, tokens: int) -> Call:
        if variant == "softmax":
            return super().prepare(variant, tokens)
        phi_q, phi_k = (self.sizes.draw(tokens, self.features, seed=seed).abs() for seed in (3, 4))
        op: Callable[..., Tensor] = (
            attend_causally if self.causal else lambda *inputs: bidirectional_attention(*inputs)[0]
        )
        return self.call(op, [phi_q, phi_k, self.sizes.inputs(tokens)[2]], [])


@dataclass(frozen=True)
class DecodeSuite(SizedSuite):
    """One new token after a context, through the attention layers of a model.

    Softmax writes its key and value into a preallocated cache, and attends to all of it through SDPA; the kernel takes
    its own step with its state. A turn is several tokens in a row. The first token of a turn has a separate figure: its
    state is no longer in the CPU caches, because softmax's keys and values have evicted it.

    Attributes:
        layers: number of attention layers.
    """

    name: ClassVar[str] = "decode"
    calls: ClassVar[int] = 8
    counts_prepared: ClassVar[bool] = True

    layers: int = 12

    @property
    def what(self) -> str:
        kernel = self.sizes.kernel + "".join(f" {k}={v}" for k, v in self.sizes.hybrid.changed.items())
        return f"{kernel}, one token through {self.layers} layers, {self.sizes.dtype}"

    def check(self) -> None:
        if not self.sizes.mixer(causal=True).info.streamable:
            raise ConfigError(f"kernel {self.sizes.kernel!r} cannot decode in constant memory; choose another kernel")

    def figures(self, row: Row) -> Mapping[str, float | None]:
        """Return the speed-up of the first token in a turn, directly after softmax's turn."""
        return {"first_speedup": row.first_speedup()}

    def prepare(self, variant: str, tokens: int) -> Call:
        return self._softmax(tokens) if variant == "softmax" else self._linear(tokens)

    def _softmax(self, context: int) -> Call:
        sizes = self.sizes
        q, k, v = (sizes.draw(1, seed=seed) for seed in range(3))
        caches = [
            tuple(sizes.draw(context + SPARE, seed=2 * layer + half) for half in (3, 4)) for layer in range(self.layers)
        ]

        @torch.no_grad()
        def step() -> None:
            for keys, values in caches:
                keys[:, :, context : context + 1] = k
                values[:, :, context : context + 1] = v
                F.scaled_dot_product_attention(q, keys[:, :, : context + 1], values[:, :, : context + 1])

        return step

    @torch.no_grad()
    def _linear(self, context: int) -> Call:
        sizes = self.sizes
        scaling = sizes.head_dim**-0.5
        q, k, v = (sizes.draw(1, seed=seed) for seed in range(3))
        mixers = [sizes.mixer(causal=True) for _ in range(self.layers)]
        first_q, first_k, first_v = (sizes.draw(PREFILL, seed=seed) for seed in range(3, 6))
        prefill = AttentionCall(first_q, first_k, first_v, scaling, needs_state=True)
        states = [mixer(prefill)[1] for mixer in mixers]
        for state in states:
            if "seen" in state:
                state["seen"].fill_(context)
            if "all_k" in state:
                set_memory(state, context)

        @torch.no_grad()
        def step() -> None:
            for layer, mixer in enumerate(mixers):
                call = AttentionCall(q, k, v, scaling, state=states[layer], needs_state=True)
                _, states[layer] = mixer(call)

        return step


def suites(args: argparse.Namespace, device: str, dtype: str) -> Iterator[Suite]:
    """Yield the requested suites."""
    hybrid = Hybrid(args.window, args.sinks, 0, args.scale, routed_blocks=args.routed_blocks)
    for kernel in args.kernel or ["hedgehog"] if args.suite == "decode" else ["hedgehog"]:
        sizes = AttentionSizes(kernel, {}, hybrid, args.heads, args.head_dim, dtype=dtype, device=device)
        if args.suite == "decode":
            yield DecodeSuite(sizes, args.layers)
        else:
            yield OpSuite(sizes, args.causal, args.backward, args.features)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("suite", choices=("op", "decode"), help="what to measure")
    add_lengths(parser, (4096, 16384), "tokens, or contexts")
    add("--kernel", action="append", help="decode: kernel; may be repeated (hedgehog)")
    add("--window", type=int, help="decode: tokens of a softmax window")
    add("--sinks", type=int, default=0, help="decode: number of first tokens that also get softmax")
    add("--scale", default="none", help="decode: learned log-scales (%(default)s)")
    add("--routed-blocks", default="", metavar="K[:B]", help="decode: blocks of keys that each query looks up")
    add("--layers", type=int, default=12, help="decode: number of attention layers (%(default)s)")
    add("--causal", action="store_true", help="op: a query sees only keys up to its own position")
    add("--backward", action="store_true", help="op: forward and backward")
    add("--features", type=int, default=128, help="op: size of the features (%(default)s)")
    add("--heads", type=int, default=12, help="(%(default)s)")
    add("--head-dim", type=int, default=64, help="(%(default)s)")
    add("--dtype", default="float32", help="(%(default)s)")
    add_machine(parser)
    add_memory(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure and print the results."""
    args = parse(argv)
    how = {name: getattr(args, name) for name in ("dtype", "device", "repeats", "threads", "memory")}
    options, lengths = checked(BenchOptions(**how)), check_lengths(args.lengths)
    asked = list(suites(args, options.device, options.dtype))
    return measure_suites(asked, lengths, options, as_json=args.json)


if __name__ == "__main__":
    # The process that measures memory finds a suite by its module, which must not be `__main__`.
    from benchmarks import attentions

    raise SystemExit(attentions.main())
