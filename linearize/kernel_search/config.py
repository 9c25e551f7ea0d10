"""Options of the search; importing this module loads nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from linearize.core.errors import ConfigError, unknown_name
from linearize.core.options import option, parse_names
from linearize.training.config import PRECISIONS, RunConfig
from linearize.training.stage_one.config import DistillConfig

CANDIDATES = (
    *("hedgehog", "hedgehog:tied=false", "hedgehog:activation=exp", "flexformer_n", "flexformer_n:tied=false"),
    *("luna", "t2r", "polaformer"),
)
"""Default candidates; those that do not fit a model are left out."""
REFERENCE = "hedgehog"
"""The kernel that plans are compared with: in every layer, with default arguments."""
COST, SOFTMAX_LAYERS = "cost", "softmax"


def parse_budget(given: str | Iterable[str] | Mapping[str, object]) -> dict[str, float]:
    """Parse a budget: "cost=0.25,softmax=1", a list of such strings, or a mapping.

    Returns:
        The limits that were given: cost (a share of softmax's time, above 0), softmax (layers).

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(given, Mapping):
        given = [f"{name}={value}" for name, value in given.items()]
    texts = [given] if isinstance(given, str) else given
    budget: dict[str, float] = {}
    for part in filter(None, map(str.strip, ",".join(texts).split(","))):
        name, equals, text = map(str.strip, part.partition("="))
        if not equals:
            raise _not_a_limit(repr(name))
        if name not in (COST, SOFTMAX_LAYERS):
            raise unknown_name("budget", name, (COST, SOFTMAX_LAYERS))
        if name in budget:
            raise ConfigError(f"budget: {name} is given twice; give it once")
        if name == SOFTMAX_LAYERS and text.isdecimal() and int(text) < 2**31:
            budget[name] = int(text)
        elif name == COST and re.fullmatch(r"\d+(\.\d*)?(e[+-]?\d+)?|\.\d+", text) and float(text) > 0:
            budget[name] = float(text)
        else:
            raise _not_a_limit(f"{name}={text}")
    return budget


def _not_a_limit(got: str) -> ConfigError:
    return ConfigError(
        f"budget: got {got}, expected cost=0.25 (share of softmax's time) or softmax=1 (layers that may stay softmax)"
    )


@dataclass(frozen=True)
class SearchConfig(RunConfig):
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
        "limits of the plan: cost=0.25 (share of softmax's time at --length), softmax=1 (layers that may stay "
        "softmax); separated by commas, or repeated",
        metavar="WHAT=N",
        repeat=True,
        parse=parse_budget,
        shown=f"the time of {REFERENCE} in every layer",
    )
    length: int = option(4096, "input length in tokens at which candidates are timed", low=1)
    steps: int = option(150, "optimizer steps of every candidate", low=1)
    query_sample: int | None = option(None, "take the loss on N random queries per row, for long rows", low=1)
    precision: str = option("no", "precision of the frozen model: no, bf16 or fp16", choices=PRECISIONS, metavar="TYPE")
    seed: int = option(0, "seed of the kernels, the order of the data and the sampling")

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", parse_budget(self.budget))
        names = parse_names(self.candidates) if isinstance(self.candidates, str) else self.candidates
        object.__setattr__(self, "candidates", tuple(names))
        self.check("search")

    @property
    def cost(self) -> float | None:
        """Share of softmax's time that a plan may take; None: as much as the reference."""
        return self.budget.get(COST)

    @property
    def softmax_layers(self) -> int:
        """How many layers may stay softmax."""
        return int(self.budget.get(SOFTMAX_LAYERS, 0))

    def learning(self) -> DistillConfig:
        """Return the training options: candidates are trained as in stage one."""
        return DistillConfig(
            steps=self.steps,
            precision=self.precision,
            query_sample=self.query_sample,
            gradient_accumulation=self.gradient_accumulation,
            seed=self.seed,
        )
