"""The tables of a search, for `search` and `convert --kernel auto`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from linearize.kernel_search.result import SearchResult


def show_search(out: Console, result: SearchResult) -> None:
    """Print each layer's choice with its reason, and the points."""
    from linearize.cli._output import table
    from linearize.kernel_search.result import WORTH

    rows = [
        [one.layer, one.module, one.label, f"{one.error:.3f}", f"{one.share:.3g}", one.why] for one in result.layers
    ]
    columns = ["layer", "module", "becomes", "output error", "of softmax's time", "why"]
    title = f"The plan, within {result.limit:.3g} of softmax's time at {result.length:,} tokens"
    out.print(table(title, columns, rows, right=(0, 3, 4)))
    points = [
        [
            f"{one.name}{' *' if one.efficient else ''}",
            one.kernels,
            f"{one.error:.4g}",
            f"{one.cosine:.4f}",
            f"{one.share:.3g}",
            f"{one.seconds:.3g}",
            "-" if one.bytes is None else f"{one.bytes / 2**20:,.0f}",
        ]
        for one in result.points
    ]
    columns = ["choice", "kernels", "error", "pooled cosine", "of softmax's time", "seconds", "MiB"]
    title = f"Whole model against its original, not aligned; error: {result.figure}"
    out.print(table(title, columns, points, right=(2, 3, 4, 5, 6)))
    out.print("*: nothing else is both closer and cheaper. -: memory was not measured.", markup=False)
    uniform = result.uniform
    if uniform is not None:
        kernel = uniform.name.removesuffix(" everywhere")
        text = f"{uniform.name} is as good: error {uniform.error:.4g}, at {uniform.share:.3g} of softmax's time"
        out.print(f"{text}; the simpler choice is: --kernel {kernel.partition('(')[0].strip()}", markup=False)
    elif result.gain is not None:
        how = f"{result.gain:.1%} below" if result.gain >= WORTH else "as large as"
        plan = f"The plan's error is {how} that of {result.reference} everywhere"
        out.print(f"{plan}, at {result.points[0].share:.3g} of softmax's time.", markup=False)
    out.print(
        f"Search: {result.steps} steps, {result.tried} plans tried in swaps, {result.seconds:.0f} s.", markup=False
    )
    if result.noisy:
        out.print("The machine was noisy while costs were measured; measure them anew with --remeasure.", markup=False)
