"""ListOps: nested lists of digits under MAX, MIN, MEDIAN and SUM MOD 10; the answer is a digit.

Grammar of Nangia & Bowman (2018, https://arxiv.org/abs/1804.06028) with the sizes of Long Range Arena
(https://arxiv.org/abs/2011.04006): a node is an operator with probability 1/4 below the deepest level, else a digit;
an operator has 2 to `most_arguments` arguments; sequences of 500 to 2,000 tokens are kept. Round brackets of the binary
tree are left out, as in Long Range Arena's input pipeline.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from linearize.core.errors import ConfigError
from linearize.core.options import check, option

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MAX": max,
    "[MIN": min,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
END = "]"
OPERATOR_SHARE = 0.25
TOKENS = (*OPERATORS, END, *(str(digit) for digit in range(10)))


@dataclass(frozen=True)
class ListOps:
    """Sizes of the data set; the defaults are Long Range Arena's."""

    train: int = option(96_000, "training rows")
    validation: int = option(2_000, "validation rows")
    shortest: int = option(500, "tokens of a row, at least", low=1)
    longest: int = option(2_000, "tokens of a row, at most", low=1)
    depth: int = option(10, "deepest nesting", low=2)
    most_arguments: int = option(10, "arguments of an operator, at most", low=2)
    seed: int = option(0, "of all rows")

    def __post_init__(self) -> None:
        check(self, "listops")
        if self.shortest > self.longest:
            raise ConfigError(f"listops: got shortest {self.shortest}, expected at most longest ({self.longest})")
        if self.most_arguments**self.depth < self.shortest:
            raise ConfigError(f"listops: no list of depth {self.depth} has {self.shortest} tokens; lower shortest")


class TooLongError(Exception):
    """The list being drawn has too many tokens."""


def rows(config: ListOps, count: int, seed: int) -> list[dict[str, object]]:
    """Draw `count` different lists -> rows with `text` (tokens between blanks) and `label` (0 to 9)."""
    chance = random.Random(seed)
    found: dict[str, int] = {}
    while len(found) < count:
        tokens: list[str] = []
        try:
            value = draw(chance, config, tokens, 1)
        except TooLongError:
            continue
        if len(tokens) >= config.shortest:
            found.setdefault(" ".join(tokens), value)
    return [{"text": text, "label": label} for text, label in found.items()]


def draw(chance: random.Random, config: ListOps, tokens: list[str], level: int) -> int:
    """Append a random list to `tokens` and return its value.

    Raises:
        TooLongError: as soon as there are more tokens than `config.longest`.
    """
    if level >= config.depth or chance.random() > OPERATOR_SHARE:
        digit = chance.randrange(10)
        tokens.append(str(digit))
        return digit
    name = chance.choice(list(OPERATORS))
    tokens.append(name)
    values = []
    for _ in range(chance.randint(2, config.most_arguments)):
        values.append(draw(chance, config, tokens, level + 1))
        if len(tokens) >= config.longest:
            raise TooLongError
    tokens.append(END)
    return OPERATORS[name](values)


def tables(config: ListOps) -> dict[str, list[dict[str, object]]]:
    """Draw both splits, which have no row in common."""
    every = rows(config, config.train + config.validation, config.seed)
    return {"train": every[config.validation :], "validation": every[: config.validation]}
