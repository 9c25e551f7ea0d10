"""Sizes and direction of one attention."""

from __future__ import annotations

from dataclasses import dataclass

from linearize.core.errors import ConfigError
from linearize.core.registry import check, option


@dataclass(frozen=True)
class HeadShape:
    """Sizes of one attention.

    Attributes:
        heads: query heads H.
        key_heads: key/value heads K; divides H.
        head_dim: size D of a query or key.
        value_dim: size V of a value.
        causal: whether a query sees only keys up to its own position.

    Raises:
        ConfigError: on construction, if a size is out of range, or `key_heads` does not divide `heads`.
    """

    heads: int = option(low=1, high=65536)
    key_heads: int = option(low=1, high=65536)
    head_dim: int = option(low=1, high=65536)
    value_dim: int = option(low=1, high=65536)
    causal: bool = option()

    def __post_init__(self) -> None:
        check(self, "attention sizes and direction")
        if self.heads % self.key_heads:
            raise ConfigError(
                f"attention sizes: got {self.heads} query heads and {self.key_heads} key/value heads, "
                "expected a whole number of query heads per key/value head"
            )
