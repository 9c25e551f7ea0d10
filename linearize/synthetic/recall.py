"""Associative recall: a row of key-value pairs ends in a key seen before; the next token is that key's value.

The task of Hedgehog's table 4 and figure 5 (https://arxiv.org/abs/2402.04347, appendix B): 40 tokens, half of them keys
and half values, 128 tokens long, so that a key comes up three times on average. Each row has a mapping of its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from linearize.errors import ConfigError

SUPERVISED = ("last", "all")


@dataclass(frozen=True)
class AssociativeRecall:
    """Sizes of the data set; the defaults are the paper's where it gives them."""

    train: int = field(default=20_000, metadata={"help": "training rows"})
    validation: int = field(default=500, metadata={"help": "validation rows"})
    vocabulary: int = field(default=40, metadata={"help": "tokens: keys and values, half each"})
    length: int = field(default=128, metadata={"help": "tokens of a row, the answer among them"})
    fewest_keys: int | None = field(
        default=None, metadata={"help": "different keys of a training row, at least; by default all: easy rows help"}
    )
    shortest: int | None = field(
        default=None, metadata={"help": "tokens of a training row, at least; by default all rows are equally long"}
    )
    supervise: str = field(default="all", metadata={"help": "answers that are trained on: all seen keys', or the last"})
    seed: int = field(default=0, metadata={"help": "of all rows"})

    def __post_init__(self) -> None:
        if self.vocabulary < 4 or self.vocabulary % 2 or self.length < 4 or self.length % 2:
            raise ConfigError(
                f"associative recall: got vocabulary {self.vocabulary} and length {self.length}, expected even numbers "
                "of at least 4"
            )
        if self.fewest_keys is not None and not 1 <= self.fewest_keys <= self.vocabulary // 2:
            raise ConfigError(
                f"associative recall: got fewest_keys {self.fewest_keys}, expected 1 to half the vocabulary"
            )
        if self.shortest is not None and (not 4 <= self.shortest <= self.length or self.shortest % 2):
            raise ConfigError(
                f"associative recall: got shortest {self.shortest}, expected an even number from 4 to the length"
            )
        if self.supervise not in SUPERVISED:
            raise ConfigError(f"associative recall: got supervise {self.supervise!r}, expected all or last")


def tokens(config: AssociativeRecall) -> tuple[str, ...]:
    """Return the vocabulary: keys, then values."""
    half = config.vocabulary // 2
    return (*(f"k{number}" for number in range(half)), *(f"v{number}" for number in range(half)))


def rows(
    config: AssociativeRecall, count: int, seed: int, supervise: str, *, easy: bool = False
) -> list[dict[str, object]]:
    """Draw rows with `text` (the answer is its last token) and `positions` (of the answers to learn or measure).

    Easy rows are of random length from `shortest` on, and their keys are a random choice of at least `fewest_keys`.
    """
    chance = random.Random(seed)
    half = config.vocabulary // 2
    made: list[dict[str, object]] = []
    for _ in range(count):
        values = [chance.randrange(half) for _ in range(half)]
        pairs, among = config.length // 2, list(range(half))
        if easy and config.shortest is not None:
            pairs = chance.randint(config.shortest // 2, pairs)
        if easy and config.fewest_keys is not None:
            among = chance.sample(among, chance.randint(config.fewest_keys, half))
        keys = [chance.choice(among) for _ in range(pairs - 1)]
        keys.append(chance.choice(keys))
        text = " ".join(f"k{key} v{values[key]}" for key in keys)
        known: set[int] = set()
        positions = []
        for place, key in enumerate(keys):
            if key in known:
                positions.append(2 * place + 1)
            known.add(key)
        made.append({"text": text, "positions": positions if supervise == "all" else positions[-1:]})
    return made


def tables(config: AssociativeRecall) -> dict[str, list[dict[str, object]]]:
    """Draw both splits; the last answer alone is measured."""
    return {
        "train": rows(config, config.train, 2 * config.seed, config.supervise, easy=True),
        "validation": rows(config, config.validation, 2 * config.seed + 1, "last"),
    }
