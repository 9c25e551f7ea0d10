"""Draw docs/images/pipeline.svg: python scripts/draw_pipeline.py

Plain SVG with its own background and with colours for light and dark mode, so that it is legible everywhere. The figure
depends only on the tables below; a test compares the committed file with them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "docs" / "images" / "pipeline.svg"

STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  .step { fill: #eef4fb; stroke: #4a7ab0 }
  .data { fill: #f6f3ea; stroke: #a58a3c }
  .head { fill: #1f2328; font-weight: 600; font-size: 15px }
  .text { fill: #4d555e; font-size: 12px }
  .line { stroke: #57606a; fill: none; stroke-width: 1.6 }
  .tip { fill: #57606a }
  text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; text-anchor: middle }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #30363d }
    .step { fill: #15263b; stroke: #6ea3dc }
    .data { fill: #2a2416; stroke: #cdb15c }
    .head { fill: #f0f3f6 }
    .text { fill: #b7bfc8 }
    .line { stroke: #9ea7b1 }
    .tip { fill: #9ea7b1 }
  }
"""
WIDTH, HEIGHT = 960, 530
BOX_WIDTH, BOX_HEIGHT = 164, 84


@dataclass(frozen=True)
class Box:
    """A box: its centre, its kind (`step` or `data`), its name, and two lines of text below the name."""

    x: int
    y: int
    kind: str
    name: str
    lines: tuple[str, str]


COLUMNS, ROWS = (105, 292, 479, 666, 853), (70, 200, 330, 460)
BOXES = {
    "data": Box(
        (COLUMNS[3] + COLUMNS[4]) // 2,
        ROWS[0],
        "data",
        "texts or images",
        ("no labels: your files,", "the Hub, or built in"),
    ),
    "model": Box(COLUMNS[0], ROWS[1], "data", "pretrained model", ("transformers or timm,", "softmax attention")),
    "plan": Box(COLUMNS[1], ROWS[1], "step", "plan", ("a trial run finds the", "attention layers")),
    "apply": Box(COLUMNS[2], ROWS[1], "step", "replace", ("kernels replace softmax,", "positions are extended")),
    "one": Box(COLUMNS[3], ROWS[1], "step", "stage one", ("each kernel imitates", "its frozen softmax")),
    "align": Box(COLUMNS[4], ROWS[1], "step", "alignment", ("blocks, then the whole,", "towards the original")),
    "save": Box(COLUMNS[4], ROWS[2], "step", "save", ("weights, code, card;", "all or nothing")),
    "checkpoint": Box(COLUMNS[3], ROWS[2], "data", "checkpoint", ("an ordinary folder", "that loads anywhere")),
    "use": Box(COLUMNS[2], ROWS[2], "step", "inference", ("AutoModel, pipeline(),", "a cache of constant size")),
    "report": Box(COLUMNS[1], ROWS[2], "step", "report, bench", ("how close it is,", "and how fast")),
    "two": Box(COLUMNS[3], ROWS[3], "step", "stage two", ("tuning on a task, with", "an optional teacher")),
}
ARROWS = (
    ("model", "plan"), ("plan", "apply"), ("apply", "one"), ("one", "align"), ("align", "save"), ("save", "checkpoint"),
    ("data", "one"), ("data", "align"), ("checkpoint", "two"), ("two", "checkpoint"), ("checkpoint", "use"),
    ("use", "report"),
)  # fmt: skip


def draw() -> str:
    """Return the SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="The pipeline of linearize"><style>{STYLE}</style>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>',
        f'<rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10"/>',
    ]
    parts += [_arrow(BOXES[start], BOXES[end], (end, start) in ARROWS) for start, end in ARROWS]
    parts += [_box(box) for box in BOXES.values()]
    return "\n".join([*parts, "</svg>", ""])


def _box(box: Box) -> str:
    x, y = box.x - BOX_WIDTH // 2, box.y - BOX_HEIGHT // 2
    texts = [f'<text class="head" x="{box.x}" y="{box.y - 14}">{escape(box.name)}</text>']
    texts += [
        f'<text class="text" x="{box.x}" y="{box.y + 9 + 17 * number}">{escape(line)}</text>'
        for number, line in enumerate(box.lines)
    ]
    frame = f'<rect class="{box.kind}" x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8"/>'
    return "\n".join([frame, *texts])


def _arrow(start: Box, end: Box, both_ways: bool) -> str:
    """Connect the facing sides of two boxes; arrows in both directions are drawn next to each other."""
    if end.y == start.y:
        way = 1 if end.x > start.x else -1
        ends = (start.x + way * BOX_WIDTH // 2, start.y, end.x - way * BOX_WIDTH // 2, end.y)
    else:
        way = 1 if end.y > start.y else -1
        shift = 14 * way if both_ways else 0
        ends = (start.x + shift, start.y + way * BOX_HEIGHT // 2, end.x + shift, end.y - way * BOX_HEIGHT // 2)
    x1, y1, x2, y2 = ends
    return f'<path class="line" d="M{x1} {y1} L{x2} {y2}" marker-end="url(#tip)"/>'


def main() -> int:
    """Write the file."""
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(draw(), encoding="utf-8")
    print(TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
