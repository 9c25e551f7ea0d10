"""ListOps: nested lists of digits under MAX, MIN, MEDIAN and SUM MOD 10; the answer is a digit.

Grammar of Nangia & Bowman (2018, https://arxiv.org/abs/1804.06028) with the sizes of Long Range Arena
(https://arxiv.org/abs/2011.04006): a node is an operator with probability 1/4 below the deepest level, else a digit;
an operator has 2 to `most_arguments` arguments; sequences of 500 to 2,000 tokens are kept. As in Long Range Arena's
input pipeline, the binary tree's round brackets are left out.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from linearize.errors import ConfigError

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

    train: int = field(default=96_000, metadata={"help": "training rows"})
    validation: int = field(default=2_000, metadata={"help": "validation rows"})
    shortest: int = field(default=500, metadata={"help": "tokens of a row, at least"})
    longest: int = field(default=2_000, metadata={"help": "tokens of a row, at most"})
    depth: int = field(default=10, metadata={"help": "deepest nesting"})
    most_arguments: int = field(default=10, metadata={"help": "arguments of an operator, at most"})
    seed: int = field(default=0, metadata={"help": "of all rows"})

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest or self.depth < 2 or self.most_arguments < 2:
            raise ConfigError(
                f"listops: got shortest {self.shortest}, longest {self.longest}, depth {self.depth} and most_arguments "
                f"{self.most_arguments}, expected shortest <= longest and the others at least 2"
            )
        if self.most_arguments**self.depth < self.shortest:
            raise ConfigError(f"listops: no list of depth {self.depth} has {self.shortest} tokens; lower shortest")


class TooLongError(Exception):
    """The list being drawn has more tokens than are wanted."""


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


def evaluate(text: str) -> int:
    """Compute the value of a list from its text."""
    stack: list[tuple[str, list[int]]] = [("", [])]
    for token in text.split():
        if token in OPERATORS:
            stack.append((token, []))
        elif token == END:
            name, values = stack.pop()
            stack[-1][1].append(OPERATORS[name](values))
        else:
            stack[-1][1].append(int(token))
    return stack[0][1][0]


def tables(config: ListOps) -> dict[str, list[dict[str, object]]]:
    """Draw both splits; no validation row is among the training rows."""
    every = rows(config, config.train + config.validation, config.seed)
    return {"train": every[config.validation :], "validation": every[: config.validation]}
