"""What each part of a hybrid is worth on a language model: perplexity by position, copying, needles, next tokens.

    python scripts/hybrid_check.py SMOLLM2 CONVERTED --text test.txt --choose validation.txt --output hybrid.json

SMOLLM2 is the softmax original, CONVERTED what `linearize convert` made of it with a window. Every row but the first is
CONVERTED with parts added or removed, without further training; the rows named "window only" are the controls. Softmax
heads and exact keys are those of CONVERTED; if it has none, the heads are chosen on --choose. The figures are taken on
--text, from token --offset on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import linearize  # noqa: F401  (loads converted checkpoints)
from linearize.attention.interface import linear_attentions
from linearize.fidelity.ablate import ablated
from linearize.fidelity.heads import keep_heads
from linearize.modeling.plan import Plan

EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUESTIONS = (
    "What is the capital of France?", "Why is the sky blue?", "Write a short poem about the sea.",
    "How do I boil an egg?", "Name three planets.", "What is a noun?", "Explain gravity to a child.",
    "List four fruits.", "Who wrote Hamlet?", "What is the boiling point of water?", "Give me a tip for sleeping well.",
    "What does a bee make?", "Tell me a fact about whales.", "How many days are in a week?",
    "Write a sentence with the word 'river'.", "What is photosynthesis?", "Suggest a name for a cat.",
    "What is the opposite of hot?", "How do plants drink?", "What is a prime number?",
)  # fmt: skip
NEW_TOKENS = 64


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits [T, vocabulary] of one row [T]."""
    found: Tensor = model(ids[None], use_cache=False).logits[0]
    return found


def perplexity(model: Any, ids: Tensor, rows: int, length: int) -> dict[str, Any]:
    """Return the perplexity over rows of a length, and the loss by position in nats per token."""
    losses = []
    for row in ids[: rows * length].view(rows, length):
        losses.append(F.cross_entropy(logits(model, row)[:-1], row[1:], reduction="none"))
    loss = torch.stack(losses)
    edges = [edge for edge in EDGES if edge <= length]
    parts = {f"{a}-{b - 1}": float(loss[:, max(0, a - 1) : b - 1].mean()) for a, b in itertools.pairwise(edges)}
    return {"perplexity": math.exp(float(loss.mean())), "nats": parts}


def copying(model: Any, ids: Tensor, rows: int, length: int) -> float:
    """Return the share of tokens that are right when a passage is read for the second time."""
    right = []
    for passage in ids[: rows * length].view(rows, length):
        said = logits(model, torch.cat([passage, passage])).argmax(dim=-1)
        right.append((said[length:-1] == passage[1:]).float().mean())
    return float(torch.stack(right).mean())


def needles(model: Any, tokenizer: Any, ids: Tensor, length: int, count: int) -> float:
    """Return the share of five-digit numbers, hidden at different depths of a row, that are said digit by digit."""
    draw = torch.Generator().manual_seed(0)
    found = 0
    for number in range(count):
        secret = "".join(str(int(x)) for x in torch.randint(10, (5,), generator=draw))
        needle = tokenizer(f" The secret number of the harbour is {secret} .", add_special_tokens=False)["input_ids"]
        question = tokenizer(" The secret number of the harbour is ", add_special_tokens=False)["input_ids"]
        answer = tokenizer(secret, add_special_tokens=False)["input_ids"]
        fill = length - len(needle) - len(question) - len(answer)
        hay = ids[number * fill : (number + 1) * fill].tolist()
        place = int((number + 0.5) / count * fill)
        row = torch.tensor([*hay[:place], *needle, *hay[place:], *question, *answer])
        said = logits(model, row).argmax(dim=-1)[-len(answer) - 1 : -1]
        found += said.tolist() == answer
    return found / count


def answers(model: Any, tokenizer: Any) -> list[tuple[Tensor, int]]:
    """Return the original's greedy answers: prompt and answer [T], and where the answer begins."""
    rows = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
        prompt = prompt if torch.is_tensor(prompt) else prompt["input_ids"]
        out = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        rows.append((out[0], prompt.shape[1]))
    return rows


def agreement(model: Any, rows: list[tuple[Tensor, int]]) -> float:
    """Return the share of the original's next tokens that a model would say too, given the original's text so far."""
    same = total = 0
    for row, start in rows:
        said = logits(model, row).argmax(dim=-1)[start - 1 : -1]
        same, total = same + int((said == row[start:]).sum()), total + len(said)
    return same / total


def change(model: Any, **values: Any) -> None:
    """Change what all converted layers have in addition to their kernels."""
    for layer in linear_attentions(model).values():
        mixer: Any = layer.mixer
        mixer.change(replace(layer.hybrid, **values))


def keep(model: Any, heads: Sequence[tuple[int, ...]]) -> None:
    """Let these heads be softmax: one tuple for each converted layer."""
    for layer, kept in zip(linear_attentions(model).values(), heads, strict=True):
        mixer: Any = layer.mixer
        mixer.change(replace(layer.hybrid, softmax_heads=kept))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original")
    parser.add_argument("converted")
    parser.add_argument("--text", required=True, help="text to measure on")
    parser.add_argument("--choose", required=True, help="text to choose heads on")
    parser.add_argument("--offset", type=int, default=0, help="first token to measure on")
    parser.add_argument("--heads", type=int, default=14, help="softmax heads, if CONVERTED has none")
    parser.add_argument("--exact-keys", type=int, default=16, help="exact keys, if CONVERTED has none")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--long", type=int, default=0, help="also the loss by position on 4 rows of this length")
    parser.add_argument("--needles", type=int, nargs="*", default=[1024, 2048], help="lengths")
    parser.add_argument("--needle-rows", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="rows of the table to measure; by default all")
    parser.add_argument("--output", required=True)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    """Measure and write; rows that --output has already are kept."""
    args = parse(words)
    tokenizer = AutoTokenizer.from_pretrained(args.original)
    ids = torch.tensor(tokenizer(Path(args.text).read_text(encoding="utf-8"))["input_ids"])[args.offset :]
    chosen_on = torch.tensor(tokenizer(Path(args.choose).read_text(encoding="utf-8")[:40_000])["input_ids"])
    original = AutoModelForCausalLM.from_pretrained(args.original).eval()
    said = answers(original, tokenizer)
    output = Path(args.output)
    table: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))["rows"] if output.exists() else {}
    settings = {name: value for name, value in vars(args).items() if name in ("offset", "rows", "long")}

    def measure(name: str, model: Any) -> None:
        if name in table or (args.only and name not in args.only):
            return
        table[name] = {
            **perplexity(model, ids, args.rows, 1024),
            "copying": copying(model, ids[args.rows * 1024 :], args.rows, 256),
            "needles": {str(n): needles(model, tokenizer, ids, n, args.needle_rows) for n in args.needles},
            "agreement": agreement(model, said),
        }
        if args.long:
            table[name]["long"] = perplexity(model, ids, 4, args.long)
        output.write_text(json.dumps({"settings": settings, "rows": table}, indent=2) + "\n", encoding="utf-8")
        print(name, json.dumps(table[name]), flush=True)

    def without_kernel(name: str) -> None:
        with ablated(model, "kernel"):
            measure(name, model)

    measure("softmax", original)
    del original
    model = AutoModelForCausalLM.from_pretrained(args.converted).eval()
    layers = linear_attentions(model).values()
    exact = max(layer.hybrid.exact_keys for layer in layers) or args.exact_keys
    heads = [tuple(layer.hybrid.softmax_heads) for layer in layers]
    change(model, exact_keys=0, softmax_heads=())
    without_kernel("window only")
    measure("kernel and window", model)
    change(model, exact_keys=exact)
    measure("exact keys", model)
    change(model, exact_keys=0)
    if not any(heads):
        batches = [{"input_ids": row[None]} for row in chosen_on[:1024].view(2, 512)]
        keep_heads(model, Plan.from_dict(model.config.linearize), args.heads, batches)
        heads = [tuple(layer.hybrid.softmax_heads) for layer in layers]
    keep(model, heads)
    settings |= {"heads": sum(map(len, heads)), "exact_keys": exact}
    without_kernel("window only, softmax heads")
    measure("softmax heads", model)
    change(model, exact_keys=exact)
    without_kernel("window only, softmax heads and exact keys")
    measure("softmax heads and exact keys", model)
    change(model, exact_keys=2 * exact)
    measure("softmax heads and twice the exact keys", model)


if __name__ == "__main__":
    main()
