"""Options for a kernel, its window and its scales, defined once for all verbs."""

from __future__ import annotations

from typing import Any

from linearize.core.options import option, parse_pairs
from linearize.core.registry import SCALES


def kernel_args(group: str | None = None) -> Any:
    """Declare the option `--kernel-arg`."""
    help = "an argument of the kernel; may be repeated"
    return option({}, help, name="kernel_arg", metavar="K=V", repeat=True, parse=parse_pairs, group=group)


def window(group: str | None = None) -> Any:
    """Declare the option `--window`."""
    return option(None, "softmax inside a window of W tokens, the kernel outside it", metavar="W", group=group)


def exact_keys(group: str | None = None) -> Any:
    """Declare the option `--exact-keys`."""
    help = "softmax for N keys per head outside the window as well: those with the largest learned scales"
    return option(0, help, metavar="N", low=0, group=group)


def scale(group: str | None = None) -> Any:
    """Declare the option `--scale`."""
    help = "learned log-scales of queries and keys: none, linear or network; by default linear with a window"
    return option(None, help, metavar="KIND", choices=SCALES, group=group)


def sinks(group: str | None = None) -> Any:
    """Declare the option `--sinks`."""
    return option(0, "softmax for the first N tokens as well", metavar="N", low=0, group=group)
