"""Options of the search for a plan; importing this loads nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from linearize.distillation.config import PRECISIONS, DistillConfig, check_states
from linearize.errors import ConfigError, unknown_name
from linearize.options import check, option, parse_names

CANDIDATES = (
    *("hedgehog", "hedgehog:tied=false", "hedgehog:activation=exp", "flexformer_n", "flexformer_n:tied=false"),
    *("luna", "t2r", "polaformer"),
)
"""What is tried unless asked otherwise; those that cannot serve a model are left out."""
REFERENCE = "hedgehog"
"""What a plan is compared with: this kernel, with its default arguments, in every layer."""
LENGTH = 4096
COST, SOFTMAX_LAYERS, TIME = "cost", "softmax", "time"
BUDGETS = (COST, SOFTMAX_LAYERS, TIME)
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_EXPECTED = "expected cost=0.25 (share of softmax's time), softmax=1 (layers that may stay softmax) or time=10m"


def parse_budget(given: str | Iterable[str] | Mapping[str, object]) -> dict[str, float]:
    """Read a budget: "cost=0.25,softmax=1,time=10m", a list of such texts, or a mapping.

    Returns:
        What was given of cost (a share of softmax's time, above 0), softmax (layers) and time (seconds).

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(given, Mapping):
        pairs = [(str(name), value) for name, value in given.items()]
    else:
        texts = [given] if isinstance(given, str) else list(given)
        parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
        for part in parts:
            if "=" not in part:
                raise ConfigError(f"budget: got {part!r}, {_EXPECTED}")
        pairs = [(part.partition("=")[0].strip(), part.partition("=")[2].strip()) for part in parts]
    found: dict[str, float] = {}
    for name, value in pairs:
        if name not in BUDGETS:
            raise unknown_name("budget", name, BUDGETS)
        if name in found:
            raise ConfigError(f"budget: {name} is given twice; give it once")
        found[name] = _amount(name, value)
    return found


def _amount(name: str, value: object) -> float:
    text = str(value)
    if name == SOFTMAX_LAYERS:
        if text.isdecimal() and int(text) < 2**31:
            return int(text)
    else:
        match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)([a-z]*)", text)
        units = UNITS if name == TIME else {"": 1.0}
        if match is not None and match[2] in units and float(match[1]) > 0:
            return float(match[1]) * units[match[2]]
    raise ConfigError(f"budget: got {name}={text}, {_EXPECTED}")


@dataclass(frozen=True)
class SearchConfig:
    """How the kernel of every layer is chosen."""

    candidates: tuple[str, ...] = option(
        CANDIDATES,
        "kernels to choose from, with arguments as in hedgehog:tied=false:window=32",
        metavar="A,B,...",
        parse=parse_names,
        shown=", ".join(CANDIDATES),
    )
    budget: Mapping[str, float] = option(
        {},
        "what the plan may take: cost=0.25 (share of softmax's time at --length), softmax=1 (layers that may stay "
        "softmax), time=10m (of the search, which then depends on the machine); with commas, or several times",
        metavar="WHAT=N",
        repeat=True,
        parse=parse_budget,
        shown=f"the time of {REFERENCE} in every layer",
    )
    length: int = option(LENGTH, "tokens at which the time and memory of a candidate are measured", low=1)
    steps: int = option(300, "optimizer steps of the candidates that stay to the end", low=1)
    swaps: int | None = option(
        None,
        "plans that are tried on the whole model to better the best one; by default L (L + 1) / 2 for L layers, 100 at "
        "most",
        low=0,
    )
    widths: int | None = option(
        None,
        "features per head, as a mean over the layers: each gets its share of them by the effective rank of its "
        "queries and keys, in every candidate whose number of features can be chosen",
        low=1,
        metavar="F",
    )
    memory: bool = option(True, "measure peak memory too; without it time only", shown="yes")
    remeasure: bool = option(False, "measure time and memory anew where they are known from an earlier search")
    query_sample: int | None = option(None, "take the loss on N random queries per row, for long rows", low=1)
    gradient_accumulation: int = option(1, "batches per optimizer step", low=1)
    precision: str = option("no", "precision of the frozen model: no, bf16 or fp16", choices=PRECISIONS, metavar="TYPE")
    save_every: int | None = option(None, "steps between states on disk, for --resume", low=1)
    keep: int = option(2, "how many of these states are kept", low=1, name="keep_states")
    folder: str | None = option(None, "where states are kept")
    resume: bool = option(False, "go on from the newest state of an interrupted run")
    seed: int = option(0, "seed of the kernels, the order of the data and the sampling")

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", parse_budget(self.budget))
        if isinstance(self.candidates, str):
            object.__setattr__(self, "candidates", parse_names(self.candidates))
        object.__setattr__(self, "candidates", tuple(self.candidates))
        check(self, "search")
        check_states(self, "search")

    @property
    def cost(self) -> float | None:
        """Share of softmax's time that a plan may take; None: the reference's."""
        return self.budget.get(COST)

    @property
    def softmax_layers(self) -> int:
        """How many layers may stay softmax."""
        return int(self.budget.get(SOFTMAX_LAYERS, 0))

    @property
    def time(self) -> float | None:
        """Seconds that the search may take, or None."""
        return self.budget.get(TIME)

    def learning(self, steps: int, rung: int = 0) -> DistillConfig:
        """Return how candidates learn in a rung: as in stage one."""
        return DistillConfig(
            steps=steps,
            precision=self.precision,
            query_sample=self.query_sample,
            gradient_accumulation=self.gradient_accumulation,
            seed=self.seed + rung,
        )
