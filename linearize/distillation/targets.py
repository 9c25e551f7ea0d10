"""What the frozen model shows of one layer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Targets(NamedTuple):
    """The softmax attention that a kernel is to imitate.

    Attributes:
        q: [B, H, R, D] queries (all T, or the sampled ones).
        k: [B, K, T, D] keys.
        scaling: what scores are multiplied with.
        causal: the direction.
        key_padding_mask: [B, T], true where there is a token, or None.
        positions: [R] ascending positions of sampled queries, or None.
    """

    q: Tensor
    k: Tensor
    scaling: float
    causal: bool
    key_padding_mask: Tensor | None = None
    positions: Tensor | None = None

    def sampled(self, positions: Tensor) -> Targets:
        """Keep the queries at some positions [R] only."""
        return self._replace(q=self.q[:, :, positions], positions=positions)

    def valid_queries(self) -> Tensor | None:
        """Return [B, R] ones where the query is a token; None: all are."""
        if self.key_padding_mask is None:
            return None
        mask = self.key_padding_mask.float()
        return mask if self.positions is None else mask[:, self.positions]

    def size(self) -> float:
        """Return the number of valid queries times heads, what the sums are divided by."""
        batch, heads, queries, _ = self.q.shape
        valid = self.valid_queries()
        return float(batch * heads * queries) if valid is None else float(valid.sum()) * heads
