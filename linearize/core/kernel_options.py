"""Options for kernels and for the additions to them, declared once for all verbs, recipes and `linearize.convert`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from linearize.core.options import option, parse_pairs
from linearize.core.registry import BLOCK_SIZE, SCALES, Values


def kernel_args(group: str | None = None) -> Any:
    """Declare the option `--kernel-arg`."""
    help = "an argument of the kernel; may be repeated"
    return option({}, help, name="kernel_arg", metavar="K=V", repeat=True, parse=parse_pairs, group=group)


@dataclass(frozen=True, kw_only=True)
class Additions:
    """The additions that the kernels of all layers get; those of one layer are a `linearize.core.registry.Hybrid`.

    Attributes:
        window: width W of a softmax window joined to the kernels, in all layers whose kernel has a feature map and a
            denominator (see `linearize.ops.window`); None for no window. Single layers can set it in their arguments.
        sinks: number of first tokens that also get softmax weights (attention sinks).
        exact_keys: number of keys per head, outside the window, that also get softmax weights: those with the largest
            learned scale (see `linearize.ops.window_causal`).
        scale: learned log-scales of queries and keys: "none", "linear" or "network"; None means linear with a window
            and "none" without (see `linearize.attention.hybrid`).
        routed_blocks: blocks of keys outside the window that each query looks up and that also get softmax weights: K,
            or "K:B" for blocks of B keys (see `linearize.ops.routed`).
    """

    window: int | None = option(None, "softmax inside a window of W tokens, the kernel outside it", metavar="W")
    sinks: int = option(0, "softmax for the first N tokens as well", metavar="N", low=0)
    exact_keys: int = option(
        0,
        "softmax for N keys per head outside the window as well: those with the largest learned scales",
        metavar="N",
        low=0,
    )
    scale: str | None = option(
        None,
        "learned log-scales of queries and keys: none, linear or network; by default linear with a window",
        metavar="KIND",
        choices=SCALES,
    )
    routed_blocks: str | int = option(
        "",
        f"softmax for K blocks of B keys (by default {BLOCK_SIZE}) outside the window as well: those with keys that "
        "fit the query best; all keys stay in memory",
        metavar="K[:B]",
    )

    @property
    def given(self) -> Values:
        """The values that differ from the defaults, by name."""
        return {name: value for name in ADDITIONS if (value := getattr(self, name)) != getattr(Additions, name)}


ADDITIONS = tuple(field.name for field in fields(Additions))
"""The names of the additions, which `Hybrid` has as well."""
