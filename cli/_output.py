"""What the verbs print: tables and JSON. People read stderr and stdout, programs read stdout with --json."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from linearize.core.errors import printable
from linearize.core.parsing import finite
from linearize.modeling.plan import UNKNOWN, LayerPlan, Plan
from linearize.training.stage_one.processes import is_main

ROOMY = 90
"""Columns of a terminal with room for a bar, the layers' losses, and tables of many columns."""


class Screen(Console):
    """A console whose terminal names and metadata cannot steer; it knows when it last printed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.spoke = time.monotonic()

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render as rich does, without control characters in the text; rich adds its own styles later."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def print(self, *objects: object, **options: Any) -> None:
        """Print as rich does; text in brackets is no markup."""
        super().print(*objects, **{"markup": False} | options)
        self.spoke = time.monotonic()


def console(*, to_stderr: bool = False) -> Screen:
    """Return a console that honours NO_COLOR, COLUMNS and the terminal's width; 120 columns without any of these.

    Only the main process prints.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    known = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Screen(file=stream, width=None if known else 120, soft_wrap=False, highlight=False, quiet=not is_main())


def print_json(data: object) -> None:
    """Print one JSON document, from the main process only; NaN and infinity, which JSON lacks, become null."""
    if is_main():
        print(json.dumps(finite(data), indent=2, allow_nan=False))


class WholeWords:
    """A table whose columns are as wide as their longest word; if they do not fit, a list with one line per cell.

    Args:
        columns: the headings.
        rows: texts, never markup.
        right: numbers of the right-aligned columns.
    """

    BORDER = 3
    """Characters of a column's border and padding; the table itself takes one more."""

    def __init__(self, columns: list[str], rows: list[list[str]], right: tuple[int, ...]) -> None:
        self.columns, self.rows, self.right = columns, rows, right

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Choose by the available width."""
        columns = [[name, *(row[at] for row in self.rows)] for at, name in enumerate(self.columns)]
        least = [_longest(word for text in texts for word in text.split()) for texts in columns]
        widths = [_longest(line for text in texts for line in text.splitlines()) for texts in columns]
        room = options.max_width - self.BORDER * len(columns) - 1
        if sum(least) > room:
            yield from self._list()
            return
        while sum(widths) > room:
            # The widest column that can shrink; rich would also shrink those that cannot.
            widths[max((width, at) for at, width in enumerate(widths) if width > least[at])[1]] -= 1
        table = Table(header_style="bold")
        for at, (name, width) in enumerate(zip(self.columns, widths, strict=True)):
            justify = "right" if at in self.right else "left"
            table.add_column(Text(name), justify=justify, overflow="fold", width=width)  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(*map(Text, row))
        yield table

    def _list(self) -> Iterator[Text]:
        """The first cell of each row as a heading, then the others, name and value."""
        for first, *rest in self.rows:
            yield Text(f"{self.columns[0]} {first}".strip(), style="bold", overflow="fold")
            for name, text in zip(self.columns[1:], rest, strict=True):
                if text:
                    yield Text(f"  {name}: {text}" if name else f"  {text}", overflow="fold")


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def table(title: str, columns: list[str], rows: Sequence[Sequence[object]], *, right: tuple[int, ...] = ()) -> Group:
    """Build a table; cells are text, never markup, and words stay whole."""
    # A table's own title would wrap at the table's width.
    return Group(Text(title, style="bold"), WholeWords(columns, [[str(cell) for cell in row] for row in rows], right))


def plan_table(plan: Plan) -> Group:
    """Show a plan: every attention, what becomes of it and why, and what to expect of it."""
    from linearize.conversion.plan import expectations

    groups = [list(layers) for _, layers in itertools.groupby(plan.layers, _alike)]
    rows = [
        [_span([layer.index for layer in group]), _folded([layer.module for layer in group]), *_alike(group[0])[:-1]]
        for group in groups
    ]
    title = f"{plan.architecture}: {len(plan.converted)} of {len(plan.layers)} attentions become linear"
    columns = ["layer", "module", "becomes", "heads/kv x size", "sees", "why it stays"]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Group(table(title, columns, rows, right=(0,)), *(Text(line) for line in expectations(plan)))


def _alike(layer: LayerPlan) -> tuple[str, ...]:
    """Return what a plan's table says of a layer, and its module without numbers; equal layers share a row."""
    shape = layer.shape
    known = shape != UNKNOWN
    arguments = ", ".join(f"{name}={value}" for name, value in (layer.arguments | layer.hybrid.changed).items())
    return (
        f"{layer.kernel} ({arguments})" if arguments else layer.kernel,
        f"{shape.heads}/{shape.key_heads} x {shape.head_dim}" if known else "unknown",
        ("causal" if shape.causal else "both ways") if known else "unknown",
        layer.reason,
        re.sub(r"\d+", "#", layer.module),
    )


def _span(numbers: Sequence[int | None]) -> str:
    known = [str(number) for number in numbers if number is not None]
    return "-".join(dict.fromkeys([*known[:1], *known[-1:]]))


def _folded(modules: Sequence[str]) -> str:
    """Name modules that differ in numbers only: `layer.0-5.self`."""
    parts = zip(*(re.split(r"(\d+)", module) for module in modules), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


LARGE = 1e5
"""Larger numbers have three digits and an exponent, unless they are whole."""


def number(value: float | None, digits: int = 3) -> str:
    """Format a figure: whole numbers above 1 (counts) without decimals, large ones as 2.57e6; a dash for None."""
    if value is None:
        return "-"
    if math.isfinite(value) and float(value).is_integer() and abs(value) > 1:
        return f"{value:.0f}"
    return f"{value:.2e}".replace("e+0", "e").replace("e+", "e") if abs(value) >= LARGE else f"{value:.{digits}f}"
