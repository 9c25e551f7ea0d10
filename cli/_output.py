"""The output of the verbs: tables and JSON.

People read stderr and stdout; with --json, programs read stdout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from linearize.core.errors import printable
from linearize.core.parsing import finite
from linearize.modeling.plan import UNKNOWN, LayerPlan, Plan
from linearize.training.processes import is_main

if TYPE_CHECKING:
    from linearize.fidelity.measure import Fidelity
    from linearize.jobs.events import Findings
    from linearize.kernel_search.result import SearchResult
    from linearize.training.alignment.loop import AlignResult

ROOMY = 90
"""Width of a terminal, in characters, with room for a bar, the layers' losses, and tables of many columns."""


class Screen(Console):
    """A console that is safe from control characters in names and metadata, and records when it last printed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.spoke = time.monotonic()

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, without control characters in the text; rich adds its own styles later."""
        plain = super().render(renderable, options)
        # All other renderables have their texts rendered here too.
        return [Segment(printable(x.text), *x[1:]) for x in plain] if isinstance(renderable, str | Text) else plain

    def print(self, *objects: object, **options: Any) -> None:
        """Print as rich does, but do not treat text in brackets as markup."""
        super().print(*objects, **{"markup": False} | options)
        self.spoke = time.monotonic()

    def on_broken_pipe(self) -> None:
        """Print no more when the reader has left (`| head`, a lost `tee`): a job continues; rich would end it."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def console(*, to_stderr: bool = False) -> Screen:
    """Return a console that honours NO_COLOR, COLUMNS and the terminal's width; 120 columns without any of these.

    Only the main process prints.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    # Names may have letters that the stream's encoding lacks.
    if isinstance(stream, io.TextIOWrapper):
        with contextlib.suppress(OSError):
            stream.reconfigure(errors="backslashreplace")
    # A terminal of unknown size may have COLUMNS=0, at which rich prints nothing.
    columns = os.environ.get("COLUMNS", "")
    known = int(columns) > 0 if columns.isdecimal() else stream.isatty()
    return Screen(file=stream, width=None if known else 120, soft_wrap=False, highlight=False, quiet=not is_main())


def print_json(data: object) -> None:
    """Print one JSON document, from the main process only; NaN and infinity, which JSON lacks, become null."""
    if is_main():
        print(json.dumps(finite(data), indent=2, allow_nan=False))


class WholeWords:
    """A table that never breaks words; if its columns do not fit, a list with one line per cell.

    Args:
        columns: the headings.
        rows: the cells as plain text, never markup.
        right: indices of the right-aligned columns.
    """

    BORDER = 3
    """Characters that a column's border and padding take; the table itself takes one more."""

    def __init__(self, columns: list[str], rows: list[list[str]], right: tuple[int, ...]) -> None:
        self.columns, self.rows, self.right = columns, rows, right

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the table or the list, depending on the available width."""
        columns = [*zip(self.columns, *self.rows, strict=True)]
        least = [max(map(cell_len, " ".join(texts).split()), default=0) for texts in columns]
        widths = [max(map(cell_len, "\n".join(texts).splitlines()), default=0) for texts in columns]
        room = options.max_width - self.BORDER * len(columns) - 1
        if sum(least) > room:
            # The first cell of each row as a heading, then the other cells as name and value.
            for first, *rest in self.rows:
                yield Text(f"{self.columns[0]} {first}".strip(), style="bold", overflow="fold")
                for name, text in zip(self.columns[1:], rest, strict=True):
                    if text:
                        yield Text(f"  {name}: {text}" if name else f"  {text}", overflow="fold")
            return
        while sum(widths) > room:
            # Shrink the widest column that can shrink; rich would also shrink the others.
            widths[max((width, at) for at, width in enumerate(widths) if width > least[at])[1]] -= 1
        table = Table(header_style="bold")
        for at, (name, width) in enumerate(zip(self.columns, widths, strict=True)):
            table.add_column(Text(name), justify="right" if at in self.right else "left", overflow="fold", width=width)
        for row in self.rows:
            table.add_row(*map(Text, row))
        yield table


def table(title: str, columns: list[str], rows: Sequence[Sequence[object]], *, right: tuple[int, ...] = ()) -> Group:
    """Build a table; cells are plain text, never markup, and words are not broken."""
    # The title of a rich table would wrap at the table's width.
    return Group(Text(title, style="bold"), WholeWords(columns, [[str(cell) for cell in row] for row in rows], right))


def plan_table(plan: Plan) -> Group:
    """Return a plan as a table: every attention layer, its kernel or why it is kept, and what to expect."""
    from linearize.conversion.plan import expectations

    rows = []
    for (*facts, _), layers in itertools.groupby(plan.layers, _alike):
        group = list(layers)
        known = [str(layer.index) for layer in group if layer.index is not None]
        numbers = "-".join(dict.fromkeys([*known[:1], *known[-1:]]))
        # The names differ only in numbers: `layer.0-5.self`.
        parts = zip(*(re.split(r"(\d+)", layer.module) for layer in group), strict=True)
        module = "".join(["-".join(dict.fromkeys((part[0], part[-1]))) for part in parts])
        rows.append([numbers, module, *facts])
    title = f"{plan.architecture}: {len(plan.converted)} of {len(plan.layers)} attentions become linear"
    columns = ["layer", "module", "becomes", "heads/kv x size", "sees", "why it stays"]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    lines = [*heads_lines(plan), *expectations(plan)]
    return Group(table(title, columns, rows, right=(0,)), *map(Text, lines))


def heads_lines(plan: Plan) -> list[str]:
    """Return the heads that keep softmax, as `--keep-softmax-heads` takes them: one line, or none without such heads.

    In the table they would give each layer a separate row.
    """
    kept = {layer.index: layer.hybrid.softmax_heads for layer in plan.converted if layer.hybrid.softmax_heads}
    if not kept:
        return []
    named = ",".join(f"{index}:{head}" for index, heads in kept.items() for head in heads)
    count = sum(layer.shape.heads for layer in plan.converted)
    return [f"Heads that keep softmax, {sum(map(len, kept.values()))} of {count} (layer:head): {named}"]


def _alike(layer: LayerPlan) -> tuple[str, ...]:
    """Return a layer's cells, and its module name without numbers; layers with equal results share a row."""
    shape = layer.shape
    known = shape != UNKNOWN
    hybrid = dataclasses.replace(layer.hybrid, softmax_heads=())
    arguments = ", ".join(f"{name}={value}" for name, value in (layer.arguments | hybrid.changed).items())
    return (
        f"{layer.kernel} ({arguments})" if arguments else layer.kernel,
        f"{shape.heads}/{shape.key_heads} x {shape.head_dim}" if known else "unknown",
        ("causal" if shape.causal else "both ways") if known else "unknown",
        layer.reason,
        re.sub(r"\d+", "#", layer.module),
    )


LARGE = 1e5
"""Numbers from here on are written with three digits and an exponent, unless they are integers."""


def number(value: float | None, digits: int = 3) -> str:
    """Format a figure: integers above 1 (counts) without decimals, large numbers as 2.57e6, None as a dash."""
    if value is None:
        return "-"
    if math.isfinite(value) and float(value).is_integer() and abs(value) > 1:
        return f"{value:.0f}"
    # A divergence of -1e-9 is rounding, not -0.000.
    return f"{value:.2e}".replace("e+0", "e").replace("e+", "e") if abs(value) >= LARGE else f"{value:z.{digits}f}"


def shown(value: float | None, form: str) -> str:
    """Format a figure as `form` says, None as a dash."""
    return "-" if value is None else form.format(value)


def show_findings(out: Console, findings: Findings) -> None:
    """Print a job's findings and the suggested next command; lines are not wrapped, so that they can be copied."""
    for line in findings.lines():
        out.print(line, soft_wrap=True)


def fidelity_table(title: str, after: Fidelity, before: Fidelity | None = None) -> Group:
    """Return a table of how close each layer is to softmax; with `before`, before and after stage one."""
    figures = ["kl", "total_variation", "negative_share", "output_error"]
    columns = ["layer", "kernel", "KL (nats/query)", "total variation", "negative weights", "output error"]
    rows = [[layer.module, layer.kernel, *(number(getattr(layer, f)) for f in figures)] for layer in after.layers]
    rows.append(["mean", "", *(number(after.mean(f)) for f in figures)])
    if before is not None:
        earlier = [[getattr(layer, f) for f in figures] for layer in before.layers]
        for row, values in zip(rows, [*earlier, [before.mean(f) for f in figures]], strict=True):
            row[2:] = [f"{number(value)} > {text}" for value, text in zip(values, row[2:], strict=True)]
        if after.mean("window_error") is not None:
            # The control: softmax's weight outside the window, and the error of the window alone.
            columns += ["far mass", "window alone"]
            for row, layer in zip(rows, after.layers, strict=False):
                row += [number(layer.far_mass), number(layer.window_error)]
            rows[-1] += [number(after.mean("far_mass")), number(after.mean("window_error"))]
    return table(title, columns, rows, right=tuple(range(2, len(columns))))


def closeness_table(result: AlignResult) -> Group:
    """Return a table of how close the whole model is to its teacher, before and after the alignment."""
    before, after = result.before, result.after
    rows = [
        [f"hidden state, {name}", "relative error", f"{error:z.3f} > {after.layers[name]:z.3f}"]
        for name, error in before.layers.items()
    ]
    rows.append(["pooled output", "cosine", f"{before.cosine:.4f} > {after.cosine:.4f}"])
    if before.logits is not None:
        rows.append(["logits", "divergence", f"{before.logits:z.4f} > {after.logits:z.4f}"])
    kept = f"kept step {result.best_step}" if result.best_step else "nothing better than the start was found"
    title = f"Whole model against its original, before > after {result.steps} steps of alignment ({kept})"
    return table(title, ["what", "figure", "before > after"], rows, right=(2,))


def show_search(out: Console, result: SearchResult) -> None:
    """Print the choice for each layer with its reason, and the plans that were tried."""
    from linearize.kernel_search.result import WORTH

    rows = [[x.layer, x.module, x.label, f"{x.error:.3f}", f"{x.share:.3g}", x.why] for x in result.layers]
    columns = ["layer", "module", "becomes", "output error", "time (softmax: 1)", "why"]
    title = f"The plan, within {result.limit:.3g} times softmax's time at {result.length:,} tokens"
    out.print(table(title, columns, rows, right=(0, 3, 4)))
    figures = {"error": ".4g", "cosine": ".4f", "share": ".3g", "seconds": ".3g"}
    points = []
    for point in result.points:
        name = f"{point.name} *" if point.efficient else point.name
        points.append([name, point.kernels, *(format(getattr(point, key), how) for key, how in figures.items())])
    columns = ["choice", "kernels", "error", "pooled cosine", "time (softmax: 1)", "seconds"]
    title = f"Whole model against its original, without alignment; error: {result.figure}"
    out.print(table(title, columns, points, right=(2, 3, 4, 5)))
    out.print("*: no other choice is both closer and cheaper.")
    uniform = result.uniform
    if uniform is not None:
        kernel = uniform.name.removesuffix(" everywhere").partition("(")[0].strip()
        text = f"{uniform.name} is as good: error {uniform.error:.4g}, at {uniform.share:.3g} times softmax's time"
        out.print(f"{text}; the simpler choice is: --kernel {kernel}")
    elif result.gain is not None:
        how = f"{result.gain:.1%} below" if result.gain >= WORTH else "as large as"
        plan = f"The plan's error is {how} that of {result.reference} everywhere"
        out.print(f"{plan}, at {result.points[0].share:.3g} times softmax's time.")
    out.print(f"Search: {result.steps} steps, {result.tried} plans tried, {result.seconds:.0f} s.")
    if result.noisy:
        out.print("The machine was noisy while costs were measured: a later search measures them again.")
