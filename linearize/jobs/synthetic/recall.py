"""Associative recall: a row of key-value pairs ends in a key seen before; the next token is that key's value.

The task of Hedgehog's table 4 and figure 5 (https://arxiv.org/abs/2402.04347, appendix B): 40 tokens, half of them keys
and half values, 128 tokens long, so that a key comes up three times on average. Each row has another mapping.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from linearize.core.errors import ConfigError
from linearize.core.options import check, option

SUPERVISED = ("last", "all")


@dataclass(frozen=True)
class AssociativeRecall:
    """Sizes of the data set; the defaults are the paper's where it gives them."""

    train: int = option(20_000, "training rows")
    validation: int = option(500, "validation rows")
    vocabulary: int = option(40, "tokens: keys and values, half each", low=4)
    length: int = option(128, "tokens of a row, including the answer", low=4)
    fewest_keys: int | None = option(
        None, "different keys of a training row, at least; by default all: easy rows help", low=1
    )
    shortest: int | None = option(
        None, "tokens of a training row, at least; by default all rows are equally long", low=4
    )
    supervise: str = option(
        "all", "answers that are trained on: those of all seen keys, or the last", choices=SUPERVISED
    )
    seed: int = option(0, "of all rows")

    def __post_init__(self) -> None:
        check(self, "associative recall")
        if self.vocabulary % 2 or self.length % 2:
            raise ConfigError(
                f"associative recall: got vocabulary {self.vocabulary} and length {self.length}, expected even numbers"
            )
        if self.fewest_keys is not None and self.fewest_keys > self.vocabulary // 2:
            raise ConfigError(
                f"associative recall: got fewest_keys {self.fewest_keys}, expected 1 to half the vocabulary"
            )
        if self.shortest is not None and (self.shortest > self.length or self.shortest % 2):
            raise ConfigError(
                f"associative recall: got shortest {self.shortest}, expected an even number from 4 to the length"
            )


def tokens(config: AssociativeRecall) -> tuple[str, ...]:
    """Return the vocabulary: keys, then values."""
    half = config.vocabulary // 2
    return (*(f"k{number}" for number in range(half)), *(f"v{number}" for number in range(half)))


def rows(
    config: AssociativeRecall, count: int, seed: int, supervise: str, *, easy: bool = False
) -> list[dict[str, object]]:
    """Draw rows with `text` (the answer is its last token) and `positions` (of the answers to learn or measure).

    Easy rows have a random length of at least `shortest`, and a random choice of at least `fewest_keys` keys.
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
    """Draw both splits; only the last answer is measured."""
    return {
        "train": rows(config, config.train, 2 * config.seed, config.supervise, easy=True),
        "validation": rows(config, config.validation, 2 * config.seed + 1, "last"),
    }
