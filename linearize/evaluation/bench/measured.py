"""Measured quality and speed of the kernels, with their sources: the table that `linearize kernels` reads.

The figures are copied from docs/benchmarks and docs/results, which give the commands; a test checks that they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Experiment:
    """An experiment that measured several kernels.

    Attributes:
        key: a letter, for tables.
        what: model, training and data.
        source: file that has the figures.
    """

    key: str
    what: str
    source: str


@dataclass(frozen=True)
class KernelQuality:
    """How close a kernel came to softmax.

    Attributes:
        kernel: name of the kernel.
        kl: KL divergence in nats per query, mean over the layers.
        experiment: where it was measured.
        arguments: kernel arguments that differ from the defaults.
        score: task score after the alignment, in percent of softmax's score; None if not measured.
    """

    kernel: str
    kl: float
    experiment: Experiment
    arguments: Mapping[str, object] = field(default_factory=dict)
    score: float | None = None


@dataclass(frozen=True)
class KernelSpeed:
    """How many times faster than SDPA a kernel was.

    Attributes:
        kernel: name of the kernel, which has its default arguments.
        what: what was timed.
        tokens: length of the input or context.
        times: how many times faster.
    """

    kernel: str
    what: str
    tokens: int
    times: float


EMBEDDING = Experiment("a", "MiniLM, 300 steps of stage one on STS-B, one seed", "docs/results/minilm-embedding.json")
MIXTURE = Experiment("b", "MiniLM, 1,000 steps of 8 sentences, one seed", "docs/benchmarks/kernels.md")
EXPERIMENTS = (EMBEDDING, MIXTURE)
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
SPEED = (
    KernelSpeed("hedgehog", FORWARD, 4096, 30.6),
    KernelSpeed("flexformer_n", FORWARD, 4096, 25.9),
    KernelSpeed("luna", FORWARD, 4096, 37.6),
    KernelSpeed("hedgehog", CAUSAL, 16384, 51.4),
    KernelSpeed("flexformer_n", CAUSAL, 16384, 46.4),
    KernelSpeed("hedgehog", DECODE, 32768, 193.7),
    KernelSpeed("flexformer_n", DECODE, 32768, 178.1),
)


def quality_of(kernel: str) -> list[KernelQuality]:
    """Return all quality figures of a kernel."""
    return [quality for quality in QUALITY if quality.kernel == kernel]


def default_quality(kernel: str) -> KernelQuality | None:
    """Return the quality of a kernel with default arguments, from the first experiment that has it."""
    return next((quality for quality in quality_of(kernel) if not quality.arguments), None)


def speed_of(kernel: str, what: str = FORWARD) -> KernelSpeed | None:
    """Return the measured speed of a kernel; None if it was not measured."""
    return next((speed for speed in SPEED if speed.kernel == kernel and speed.what == what), None)
