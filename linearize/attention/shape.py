"""Sizes and direction of one attention."""

from __future__ import annotations

from dataclasses import dataclass

from linearize.core.errors import ConfigError


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

    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    causal: bool

    def __post_init__(self) -> None:
        sizes = (self.heads, self.key_heads, self.head_dim, self.value_dim)
        if not all(type(size) is int and 1 <= size <= 65536 for size in sizes):
            raise ConfigError(f"attention sizes: got {sizes}, expected whole numbers from 1 to 65536")
        if not isinstance(self.causal, bool):
            raise ConfigError(f"attention direction: got causal {self.causal!r}, expected true or false")
        if self.heads % self.key_heads:
            raise ConfigError(
                f"attention sizes: got {self.heads} query heads and {self.key_heads} key/value heads, "
                "expected a whole number of query heads per key/value head"
            )
