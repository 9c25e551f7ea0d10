"""Measure routed blocks on a language model without any training: perplexity, and hidden numbers that are found.

    python scripts/routed_blocks.py SMOLLM2 --text wiki.valid.txt --length 4096 --rows 2 --output routed.json

Each query sees a softmax window, sinks, and the K blocks of B earlier keys whose mean key has the largest product with
the query; nothing else has a weight. Every row of text has eight sentences with numbers inserted, and ends with
questions about them: one pass measures the perplexity of the text, and the answers. Forms that are already in the
--output file are kept, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from linearize.core.parsing import check_file

NAMES = ("harbour", "castle", "garden", "bridge", "market", "tower", "forest", "station")
RECALL = ((4, 1), (7, 7), (8, 0), (14, 3), (15, 6), (17, 3), (18, 6), (18, 7), (20, 2), (20, 3), (20, 5), (20, 6),
          (23, 2), (23, 7))  # fmt: skip
"""The 14 heads of `--preset recall` (docs/benchmarks/proof.md): layer and head."""
QUERIES = 256
"""Queries that are computed at once."""


@dataclass(frozen=True)
class Form:
    """What a query sees.

    Attributes:
        window: keys of the window; 0: all keys, that is softmax.
        sinks: first keys.
        blocks: blocks of earlier keys.
        size: keys per block.
        group: queries that share a choice, by their mean query; more than one look ahead.
        last: queries whose mean makes the choice: that of a query and those before it.
        score: how a block is judged: by its mean key ("mean"), by its best key in the query's largest channels
            ("channels"), or by the mass of softmax ("mass").
        channels: number of these channels.
        routed: "all" heads, or the heads of "recall"; the others then have the window and sinks alone.
    """

    window: int = 0
    sinks: int = 4
    blocks: int = 0
    size: int = 8
    group: int = 1
    last: int = 1
    score: str = "mean"
    channels: int = 8
    routed: str = "all"

    @property
    def reads(self) -> int:
        """Keys that a query reads at most."""
        return self.window + self.sinks + self.blocks * self.size


FORMS = {
    "softmax": Form(),
    "window 128": Form(128),
    "16 blocks": Form(64, blocks=16),
    "34 blocks": Form(128, blocks=34),
    "60 blocks": Form(128, blocks=60),
    "85 blocks": Form(128, blocks=85),
    "34 blocks, per 8 queries": Form(128, blocks=34, group=8),
    "34 blocks, by the last 8 queries": Form(128, blocks=34, last=8),
    "34 blocks, true mass": Form(128, blocks=34, score="mass"),
    "34 blocks, recall's heads": Form(128, blocks=34, routed="recall"),
    "68 blocks of 4": Form(128, blocks=68, size=4),
    "34 blocks, 8 channels": Form(128, blocks=34, score="channels"),
    "272 keys, 8 channels": Form(128, blocks=272, size=1, score="channels"),
    "272 keys, 4 channels": Form(128, blocks=272, size=1, score="channels", channels=4),
    "128 keys, 8 channels": Form(128, blocks=128, size=1, score="channels"),
    "272 keys, true mass": Form(128, blocks=272, size=1, score="mass"),
    "544 keys, 8 channels": Form(128, blocks=544, size=1, score="channels"),
    "64 keys, 8 channels": Form(32, blocks=64, size=1, score="channels"),
    "8 blocks": Form(32, blocks=8),
    "window 32": Form(32),
    "softmax, recall's heads": Form(128, blocks=10**6, routed="recall"),
}


def block_scores(q: Tensor, k: Tensor, form: Form, scaling: float) -> Tensor:
    """Return the scores [H, N, M] of M blocks for N groups of queries q [H, n, D], given all keys k [H, S, D]."""
    count = k.shape[1] // form.size
    queries = F.pad(q, (0, 0, 0, -q.shape[1] % form.group)).unflatten(1, (-1, form.group))
    blocks = k[:, : count * form.size].unflatten(1, (count, form.size))
    if form.score == "mean":
        return queries.mean(dim=2) @ blocks.mean(dim=2).mT
    if form.score == "channels":
        mean = queries.mean(dim=2)
        largest = mean.abs().topk(form.channels, dim=-1, sorted=False).indices
        some = torch.zeros_like(mean).scatter(-1, largest, mean.gather(-1, largest))
        products = some @ blocks.flatten(1, 2).mT
        return products if form.size == 1 else products.unflatten(2, (count, form.size)).amax(dim=-1)
    scores = (queries.flatten(1, 2) @ blocks.flatten(1, 2).mT * scaling).unflatten(2, (count, form.size)).logsumexp(-1)
    return scores.unflatten(1, (-1, form.group)).logsumexp(2)


def visible(q: Tensor, k: Tensor, form: Form, start: int, scaling: float, routed: Sequence[int]) -> Tensor:
    """Return the keys that queries `start`, `start` + 1 ... see: bool [H, n, S], given q [H, n, D] and k [H, S, D]."""
    query, key = start + torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    earlier = key <= query
    near = (earlier & ((key > query - form.window) | (key < form.sinks))).expand(len(q), -1, -1)
    if form.blocks == 0 or k.shape[1] < form.size:
        return near
    scores = block_scores(q, k, form, scaling)
    # Only blocks with a key that has left the window of the group's first query.
    first = start + form.group * torch.arange(scores.shape[1])[:, None]
    scores = scores.masked_fill(form.size * torch.arange(scores.shape[2]) > first - form.window, -math.inf)
    best = scores.topk(min(form.blocks, scores.shape[-1]), dim=-1, sorted=False)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values > -math.inf)
    keys = chosen.repeat_interleave(form.group, 1)[:, : q.shape[1]].repeat_interleave(form.size, 2)
    keys = F.pad(keys, (0, k.shape[1] - keys.shape[2]))
    keep = torch.zeros(len(q), 1, 1, dtype=torch.bool).index_fill(0, torch.tensor(routed, dtype=torch.long), True)
    return near | (keys & keep & earlier)


class Attention:
    """Attention in a form, as transformers calls it; `read` collects the share of the earlier keys that are read."""

    form = Form()
    read: ClassVar[list[float]] = []

    @classmethod
    def attend(cls, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        """Return the outputs [1, T, H, D] and no weights."""
        form, groups = cls.form, q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        if form.window == 0:
            cls.read.append(1.0)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling).transpose(1, 2), None
        heads = range(q.shape[1])
        choosing = F.avg_pool1d(F.pad(q[0].mT, (form.last - 1, 0)), form.last, stride=1).mT
        routed = [h for h in heads if form.routed == "all" or (module.layer_idx, h) in RECALL]
        out = []
        for start in range(0, q.shape[2], QUERIES):
            part, end = q[:, :, start : start + QUERIES], start + QUERIES
            seen = visible(choosing[:, start:end], k[0, :, :end], form, start, scaling, routed)
            if start:
                cls.read.append(float(seen.sum() / seen.shape[0] / (start + torch.arange(part.shape[2]) + 1).sum()))
            out.append(F.scaled_dot_product_attention(part, k[:, :, :end], v[:, :, :end], seen[None], scale=scaling))
        return torch.cat(out, dim=2).transpose(1, 2), None


def row_with_numbers(tokenizer: Any, text: Tensor, length: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Return a row of `length` tokens with eight numbers inserted and asked for.

    Returns:
        "ids" [L]; "text" [L] bool, which tokens are text; "answers" [8, 2], first and last token of each answer.
    """

    def code(words: str) -> list[int]:
        ids: list[int] = tokenizer(words, add_special_tokens=False)["input_ids"]
        return ids

    secrets = ["".join(map(str, torch.randint(10, (5,), generator=draw).tolist())) for _ in NAMES]
    facts = [code(f" The secret number of the {name} is {s} .") for name, s in zip(NAMES, secrets, strict=True)]
    asked = [(code(f" The secret number of the {name} is "), code(s)) for name, s in zip(NAMES, secrets, strict=True)]
    fill = length - sum(map(len, facts)) - sum(len(question) + len(answer) for question, answer in asked)
    ids: list[int] = []
    of_text: list[bool] = []
    for number, fact in enumerate(facts):
        edges = [int(fill * x / len(facts)) for x in (max(0.0, number - 0.5), number + 0.5)]
        hay = text[edges[0] if number else 0 : edges[1]].tolist()
        ids, of_text = [*ids, *hay, *fact], [*of_text, *[True] * len(hay), *[False] * len(fact)]
    hay = text[edges[1] : fill].tolist()
    ids, of_text, answers = [*ids, *hay], [*of_text, *[True] * len(hay)], []
    for question, answer in asked:
        answers.append([len(ids) + len(question), len(ids) + len(question) + len(answer)])
        ids += [*question, *answer]
    of_text += [False] * (length - len(of_text))
    return {"ids": torch.tensor(ids), "text": torch.tensor(of_text), "answers": torch.tensor(answers)}


def copied_row(text: Tensor) -> dict[str, Tensor]:
    """Return a row of a passage read twice; its only answer is the second reading but for the first token."""
    answer = torch.tensor([[len(text) + 1, 2 * len(text)]])
    return {"ids": torch.cat([text, text]), "text": torch.arange(2 * len(text)) < len(text), "answers": answer}


@torch.no_grad()
def measure(model: Any, row: dict[str, Tensor]) -> dict[str, Any]:
    """Return the summed loss of the text, its tokens, and of the answers: which are right ("1"), the share of their
    tokens that are right, and their log-probabilities."""
    hidden = model.model(row["ids"][None], use_cache=False).last_hidden_state[0]
    losses, hits = [], []
    for part, wanted in zip(hidden[:-1].split(256), row["ids"][1:].split(256), strict=True):
        pieces = model.lm_head(part).float()
        losses.append(F.cross_entropy(pieces, wanted, reduction="none"))
        hits.append(pieces.argmax(dim=-1) == wanted)
    # Token 0 is not predicted.
    loss, right = F.pad(torch.cat(losses), (1, 0)), F.pad(torch.cat(hits), (1, 0))
    of_text = row["text"].clone()
    of_text[0] = False
    return {
        "nats": float(loss[of_text].sum()),
        "tokens": int(of_text.sum()),
        "found": "".join(str(int(bool(right[a:b].all()))) for a, b in row["answers"].tolist()),
        "right": float(torch.cat([right[a:b] for a, b in row["answers"].tolist()]).float().mean()),
        "log_probabilities": [round(-float(loss[a:b].sum()), 3) for a, b in row["answers"].tolist()],
    }


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original", help="SmolLM2-135M-Instruct's GGUF file")
    parser.add_argument("--text", required=True, help="text to measure on")
    parser.add_argument("--length", type=int, default=4096, help="tokens per row")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--copies", type=int, default=0, help="read N passages twice instead: rows of copied text")
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=list(FORMS), help="forms; by default all")
    parser.add_argument("--output", required=True)
    args = parser.parse_args(words)
    check_file(args.output, "--output", (".json",), overwrite=True)
    return args


def main(words: list[str] | None = None) -> None:
    """Measure the forms and write the figures; those already in the --output file are kept."""
    args = parse(words)
    source, output = Path(args.original), Path(args.output)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32).eval()
    AttentionInterface.register("routed", Attention.attend)
    model.set_attn_implementation("routed")
    ids = torch.tensor(tokenizer(Path(args.text).read_text(encoding="utf-8"))["input_ids"])
    draw = torch.Generator().manual_seed(0)
    if args.copies:
        half = args.length // 2
        rows = [copied_row(ids[n * half : (n + 1) * half]) for n in range(args.copies)]
    else:
        rows = [row_with_numbers(tokenizer, ids[n * args.length :], args.length, draw) for n in range(args.rows)]
    done: dict[str, Any] = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    for number, name in itertools.product(range(len(rows)), args.forms):
        title = f"{name}, {args.length}" + ", copied" * (args.copies > 0)
        results = done.get(title, {"rows": []})["rows"]
        if len(results) > number:
            continue
        Attention.form, Attention.read, start = FORMS[name], [], time.perf_counter()
        results.append(measure(model, rows[number]))
        nats, tokens = sum(r["nats"] for r in results), sum(r["tokens"] for r in results)
        done[title] = {
            "form": asdict(FORMS[name]),
            "perplexity": math.exp(nats / tokens),
            "found": "".join(r["found"] for r in results),
            "log_probability": statistics.fmean(x for r in results for x in r["log_probabilities"]),
            "share of the row": FORMS[name].reads / args.length if FORMS[name].window else 1.0,
            "share of the earlier keys": sum(Attention.read) / len(Attention.read),
            "rows": results,
        }
        if args.copies:
            done[title]["copied"] = sum(r["right"] for r in results) / len(results)
        output.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        print(title, {k: v for k, v in done[title].items() if k not in ("rows", "form")},
              f"{time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
