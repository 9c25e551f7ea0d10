"""What was measured of the kernels, with where it stands: the one table that `linearize kernels` reads.

The figures are those of docs/benchmarks and docs/results, which say with which commands; a test holds them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Experiment:
    """What several kernels were measured in.

    Attributes:
        key: a letter, for tables.
        what: what was done.
        source: where the figures stand.
    """

    key: str
    what: str
    source: str


@dataclass(frozen=True)
class KernelQuality:
    """How close a kernel came to softmax.

    Attributes:
        kernel: its name.
        kl: nats per query, mean over the layers.
        experiment: in what.
        arguments: its arguments that are not the defaults.
        score: of the task after the alignment, as a share of softmax's in percent; None where none was measured.
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
        kernel: its name, with its default arguments.
        what: what was timed.
        tokens: at which length.
        times: how many times faster.
        noisy: whether the machine called itself too noisy.
    """

    kernel: str
    what: str
    tokens: int
    times: float
    noisy: bool = False


EMBEDDING = Experiment("a", "MiniLM, 300 steps of stage one on STS-B, one seed", "docs/results/minilm-embedding.json")
MIXTURE = Experiment(
    "b",
    "MiniLM, 1,000 steps of 8 sentences, one seed",
    "docs/benchmarks/kernels.md",
)
EXPERIMENTS = (EMBEDDING, MIXTURE)
QUALITY = (
    KernelQuality("hedgehog", 0.0431, EMBEDDING, score=99.8),
    KernelQuality("flexformer_n", 0.0306, EMBEDDING, score=99.91),
    KernelQuality("luna", 0.269, EMBEDDING, score=99.69),
    KernelQuality("t2r", 0.1256, EMBEDDING, score=99.72),
    KernelQuality("hedgehog", 0.117, MIXTURE),
    KernelQuality("hedgehog", 0.085, MIXTURE, {"features": 128}),
    KernelQuality("hedgehog", 0.076, MIXTURE, {"features": 128, "tied": "false"}),
    KernelQuality("flexformer_n", 0.09, MIXTURE),
    KernelQuality("flexformer_n", 0.067, MIXTURE, {"frequencies": 64}),
    KernelQuality("hedgehog", 0.133, MIXTURE, {"activation": "exp"}),
    KernelQuality("flexformer_n", 0.129, MIXTURE, {"form": "damped"}),
    KernelQuality("luna", 0.401, MIXTURE),
    KernelQuality("t2r", 0.299, MIXTURE),
    KernelQuality("flexformer_s", 0.372, MIXTURE, {"form": "squared"}),
    KernelQuality("flexformer_n", 0.316, MIXTURE, {"form": "paper", "floor": 0}),
    KernelQuality("flexformer_s", 0.359, MIXTURE, {"form": "paper", "floor": 0}),
    KernelQuality("performer", 0.984, MIXTURE),
    KernelQuality("elu", 1.307, MIXTURE),
)
FORWARD, CAUSAL, DECODE = "attention, forward", "causal attention, forward", "decoding, 12 layers"
SPEED_SOURCE = "docs/benchmarks/speed.md: 2 CPU cores, 12 heads of size 64, fp32, native op, against SDPA"
SPEED = (
    KernelSpeed("hedgehog", FORWARD, 4096, 19.7, noisy=True),
    KernelSpeed("flexformer_n", FORWARD, 4096, 16.6, noisy=True),
    KernelSpeed("luna", FORWARD, 4096, 23.0),
    KernelSpeed("hedgehog", CAUSAL, 16384, 37.0),
    KernelSpeed("flexformer_n", CAUSAL, 16384, 31.0),
    KernelSpeed("hedgehog", DECODE, 32768, 369.0, noisy=True),
    KernelSpeed("flexformer_n", DECODE, 32768, 257.0, noisy=True),
)


def quality_of(kernel: str) -> list[KernelQuality]:
    """Return what was measured of a kernel."""
    return [one for one in QUALITY if one.kernel == kernel]


def default_quality(kernel: str) -> KernelQuality | None:
    """Return the quality of a kernel with its default arguments, of the first experiment that had it."""
    return next((one for one in QUALITY if one.kernel == kernel and not one.arguments), None)


def speed_of(kernel: str, what: str = FORWARD) -> KernelSpeed | None:
    """Return how fast a kernel was."""
    return next((one for one in SPEED if one.kernel == kernel and one.what == what), None)
