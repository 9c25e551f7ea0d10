"""Draw docs/images/quality-and-speed.svg: python scripts/draw_quality.py

One point per kernel and model: the share of softmax's score that is kept, against the speed-up of one attention layer
at 4,096 tokens. Every figure is read from the file where it was published:

- quality from docs/results: minilm-embedding.json (STS-B, zero-shot), minilm-glue-three-seeds.json (average of four
  tasks), vit-cifar10.json (accuracy), llama-small-wikitext2.json and smollm2-hybrid.json (softmax's perplexity over the
  converted model's);
- speed from speed.json: one attention layer with 12 heads of size 64 against SDPA, native op, two CPU cores. Encoders
  use the bidirectional forward pass, decoders the causal one; a window has a row of its own.

The speed is that of this attention layer, not of the models, whose heads differ in size. A test compares the committed
file with the output of this script.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "images" / "quality-and-speed.svg"

WIDTH, HEIGHT = 960, 470
LEFT, RIGHT, TOP, BOTTOM = 80, 690, 40, 400
FASTEST, LEAST, MOST = 64, 70, 104
KERNELS = {"hedgehog": "a", "flexformer_n": "b", "luna": "c", "hedgehog and a window": "d"}
"""CSS class of each kernel's colour."""
SHAPES = {
    "MiniLM, embeddings": "circle",
    "MiniLM, GLUE": "square",
    "ViT, CIFAR-10": "triangle",
    "Llama 10.6M": "diamond",
    "SmolLM2-135M": "cross",
}
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  .grid { stroke: #d0d7de }
  .even { stroke: #57606a; stroke-dasharray: 5 4 }
  .head { fill: #1f2328; font-size: 14px; font-weight: 600 }
  .text { fill: #4d555e; font-size: 13px }
  .mark { stroke: #ffffff; stroke-width: 1.2 }
  .a { fill: #1f6feb } .b { fill: #bf5700 } .c { fill: #1a7f37 } .d { fill: #8250df } .shape { fill: #57606a }
  text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #30363d }
    .grid { stroke: #30363d }
    .even { stroke: #9ea7b1 }
    .head { fill: #f0f3f6 }
    .text { fill: #b7bfc8 }
    .mark { stroke: #0d1117 }
    .a { fill: #58a6ff } .b { fill: #f0883e } .c { fill: #56d364 } .d { fill: #bc8cff } .shape { fill: #9ea7b1 }
  }
"""


@dataclass(frozen=True)
class Point:
    """One kernel in one model.

    Attributes:
        kernel: a key of `KERNELS`.
        model: a key of `SHAPES`.
        times: speed of one attention layer at 4,096 tokens, relative to softmax.
        kept: score in percent of softmax's.
    """

    kernel: str
    model: str
    times: float
    kept: float


def points() -> list[Point]:
    """Return all points, read from the files named above."""
    bidirectional = {name: speed(f"{name}, bidirectional") for name in ("hedgehog", "flexformer_n", "luna")}
    causal = speed("hedgehog, causal")
    causal_window = speed("hedgehog window=64 sinks=4, causal")
    seeds = result("minilm-glue-three-seeds")
    embedding = {row["row"]: row["recovered_percent"] for row in result("minilm-embedding")["rows"]}
    found = [Point(name, "MiniLM, embeddings", bidirectional[name], embedding[name]) for name in bidirectional]
    glue = {row.partition(" ")[0]: x["share_percent"] for row, x in seeds["average"]["rows"].items()}
    found += [Point(name, "MiniLM, GLUE", bidirectional[name], glue[name]) for name in ("hedgehog", "flexformer_n")]
    images = {row["row"]: row.get("share_of_softmax_percent") for row in result("vit-cifar10")["rows"]}
    found += [Point(name, "ViT, CIFAR-10", bidirectional[name], images[name]) for name in ("hedgehog", "flexformer_n")]
    llama = {row["row"]: row.get("share_of_softmax_percent") for row in result("llama-small-wikitext2")["rows"]}
    found.append(Point("hedgehog", "Llama 10.6M", causal, llama["hedgehog"]))
    found.append(Point("hedgehog and a window", "Llama 10.6M", causal_window, llama["hedgehog window 64, sinks 4"]))
    smollm2 = {name: row["perplexity"] for name, row in result("smollm2-hybrid")["rows"].items()}
    kept = 100 * smollm2["softmax"] / smollm2["kernel and window"]
    return [*found, Point("hedgehog and a window", "SmolLM2-135M", causal_window, kept)]


def result(name: str) -> dict:
    """Return one file of docs/results."""
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def speed(attention: str) -> float:
    """Return how many times as fast an attention's forward pass of 4,096 tokens is, with the native op.

    Raises:
        ValueError: unless it was measured exactly once.
    """
    rows = [row for row in result("speed")["rows"] if row["what"] == f"{attention}, forward, float32"]
    [found] = [row["speedup"] for row in rows if row["native"] and row["tokens"] == 4096]
    return found


def place(times: float, kept: float) -> tuple[float, float]:
    """Return the position of a point; times are on a logarithmic scale."""
    x = LEFT + (RIGHT - LEFT) * math.log(times) / math.log(FASTEST)
    y = BOTTOM - (BOTTOM - TOP) * (kept - LEAST) / (MOST - LEAST)
    return round(x, 1), round(y, 1)


def marker(shape: str, x: float, y: float, colour: str) -> str:
    """Return one marker."""
    if shape == "circle":
        return f'<circle cx="{x}" cy="{y}" r="6" class="mark {colour}"/>'
    ways = {
        "square": "M-6 -6H6V6H-6Z",
        "triangle": "M0 -8L7 5H-7Z",
        "diamond": "M0 -8L8 0L0 8L-8 0Z",
        "cross": "M-2 -7H2V-2H7V2H2V7H-2V2H-7V-2H-2Z",
    }
    return f'<path d="{ways[shape]}" transform="translate({x} {y})" class="mark {colour}"/>'


def axes() -> list[str]:
    """Return the grid, the labels and the line of softmax's own score."""
    parts = []
    for times in (1, 2, 4, 8, 16, 32, 64):
        x, _ = place(times, LEAST)
        parts.append(f'<path d="M{x} {TOP}V{BOTTOM}" class="grid"/>')
        parts.append(f'<text x="{x}" y="{BOTTOM + 22}" text-anchor="middle" class="text">{times}</text>')
    for kept in (70, 80, 90, 100):
        _, y = place(1, kept)
        parts.append(f'<path d="M{LEFT} {y}H{RIGHT}" class="{"even" if kept == 100 else "grid"}"/>')
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end" class="text">{kept} %</text>')
    middle = (LEFT + RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{BOTTOM + 48}" text-anchor="middle" class="head">times faster than softmax '
        "(SDPA), one attention, 4,096 tokens</text>"
    )
    parts.append(f'<text x="{LEFT}" y="{TOP - 14}" class="head">share of softmax\'s score that is kept</text>')
    return parts


def legend() -> list[str]:
    """Return the legend of colours and shapes."""
    x, y = RIGHT + 40, TOP + 24
    parts = []
    for title, names in (("kernel", KERNELS), ("model", SHAPES)):
        parts.append(f'<text x="{x - 6}" y="{y}" class="head">{title}</text>')
        for name, value in names.items():
            y += 26
            sign = ("circle", value) if title == "kernel" else (value, "shape")
            parts.append(marker(sign[0], x, y - 4, sign[1]))
            parts.append(f'<text x="{x + 16}" y="{y}" class="text">{escape(name)}</text>')
        y += 44
    return parts


def draw() -> str:
    """Return the picture as SVG."""
    label = "Share of softmax's score that is kept against times faster, one point per kernel and model"
    shapes = [marker(SHAPES[p.model], *place(p.times, p.kept), KERNELS[p.kernel]) for p in points()]
    card = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" class="card"/>'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">',
        f"<style>{STYLE}</style>", card, *axes(), *shapes, *legend(), "</svg>", "",
    ])  # fmt: skip


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
    for point in points():
        print(f"{point.model:20} {point.kernel:22} {point.times:5.1f} times  {point.kept:6.1f} %")
