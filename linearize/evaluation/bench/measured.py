"""Measured quality and speed of the kernels, with their sources: the table that `linearize kernels` reads.

The figures are copied from docs/benchmarks and docs/results, which give the commands; a test checks that they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KernelQuality:
    """How close a kernel came to softmax.

    Attributes:
        kernel: name of the kernel.
        kl: KL divergence in nats per query, mean over the layers.
        experiment: where it was measured, a key of `EXPERIMENTS`.
        arguments: kernel arguments that differ from the defaults.
        score: task score after the alignment, in percent of softmax's score; None if not measured.
    """

    kernel: str
    kl: float
    experiment: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    score: float | None = None


EMBEDDING, MIXTURE = "a", "b"
EXPERIMENTS = {
    EMBEDDING: ("MiniLM, 300 steps of stage one on STS-B, one seed", "docs/results/minilm-embedding.json"),
    MIXTURE: ("MiniLM, 1,000 steps of 8 sentences, one seed", "docs/benchmarks/kernels.md"),
}
"""Experiments that measured several kernels, by letter: model, training and data, and the file that has the figures."""
QUALITY = (
    KernelQuality("hedgehog", 0.0431, EMBEDDING, score=99.8),
    KernelQuality("flexformer_n", 0.0306, EMBEDDING, score=99.91),
    KernelQuality("luna", 0.0606, EMBEDDING, score=99.79),
    KernelQuality("t2r", 0.1256, EMBEDDING, score=99.72),
    KernelQuality("hedgehog", 0.117, MIXTURE),
    KernelQuality("hedgehog", 0.085, MIXTURE, {"features": 128}),
    KernelQuality("hedgehog", 0.076, MIXTURE, {"features": 128, "tied": "false"}),
    KernelQuality("flexformer_n", 0.09, MIXTURE),
    KernelQuality("flexformer_n", 0.067, MIXTURE, {"frequencies": 64}),
    KernelQuality("hedgehog", 0.133, MIXTURE, {"activation": "exp"}),
    KernelQuality("flexformer_n", 0.129, MIXTURE, {"form": "damped"}),
    KernelQuality("luna", 0.109, MIXTURE, {"projections": 32, "channels": 2}),
    KernelQuality("luna", 0.209, MIXTURE),
    KernelQuality("luna", 0.294, MIXTURE, {"start": "paper"}),
    KernelQuality("t2r", 0.306, MIXTURE),
    KernelQuality("flexformer_s", 0.372, MIXTURE, {"form": "squared"}),
    KernelQuality("flexformer_n", 0.314, MIXTURE, {"form": "paper", "floor": 0}),
    KernelQuality("flexformer_s", 0.358, MIXTURE, {"form": "paper", "floor": 0}),
    KernelQuality("performer", 0.984, MIXTURE),
    KernelQuality("elu", 1.307, MIXTURE),
)
FORWARD, CAUSAL, DECODE = "attention, forward", "causal attention, forward", "decoding, 12 layers"
SPEED_SOURCE = "docs/benchmarks/speed.md: 2 CPU cores, 12 heads of size 64, fp32, native op, against SDPA"
SPEED = {
    FORWARD: (4096, {"hedgehog": 30.6, "flexformer_n": 25.9, "luna": 37.6}),
    CAUSAL: (16384, {"hedgehog": 51.4, "flexformer_n": 46.4}),
    DECODE: (32768, {"hedgehog": 193.7, "flexformer_n": 178.1}),
}
"""How many times faster than SDPA kernels with default arguments were, by what was timed: the length of the input or
context, and the figures."""


def quality_of(kernel: str) -> list[KernelQuality]:
    """Return all quality figures of a kernel."""
    return [quality for quality in QUALITY if quality.kernel == kernel]


def default_quality(kernel: str) -> KernelQuality | None:
    """Return the quality of a kernel with default arguments, from the first experiment that has it."""
    return next((quality for quality in quality_of(kernel) if not quality.arguments), None)
