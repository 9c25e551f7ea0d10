"""Compare cheap scores of keys on one pass of softmax: the share of softmax's far weights that the chosen keys have.

    python scripts/routed_scores.py SMOLLM2 --text wiki.test.txt --output scores.json

Far keys are those outside a window of 128 tokens and 4 sinks. Each query chooses the blocks whose best key has the
highest score, or whose mean key has, and always `--keys` keys. Two rows of 4,096 tokens: from the first, plain text,
come the directions of low-rank keys; the second, 100,000 tokens later, has hidden numbers (scripts/routed_blocks.py),
and is judged.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from routed_blocks import row_with_numbers
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from linearize.core.parsing import check_file

LENGTH, WINDOW, SINKS = 4096, 128, 4
LAYERS = (0, 2, 5, 8, 11, 14, 15, 17, 18, 20, 23, 26, 29)
SIZES = (1, 4, 8, 16)


def largest(x: Tensor, count: int) -> Tensor:
    """Return x [..., D], zero but for the channels of largest magnitude."""
    index = x.abs().topk(count, dim=-1).indices
    return torch.zeros_like(x).scatter(-1, index, x.gather(-1, index))


def root(moment: Tensor, power: float) -> Tensor:
    """Return a power of a symmetric matrix [D, D], in fp64."""
    values, vectors = torch.linalg.eigh(moment.double())
    return (vectors * values.clamp(min=1e-6 * float(values.max())) ** power) @ vectors.T


def directions(q: Tensor, k: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the maps [r, D] of queries and keys whose products are closest to q . k, given q [N, D] and k [S, D]."""
    k = k - k.mean(dim=0)
    of_keys = k.T @ k / len(k)
    back = root(of_keys, -0.5)
    keys = torch.linalg.svd(root(q.T @ q / len(q), 0.5) @ root(of_keys, 0.5))[2][:count] @ back
    moment = of_keys.double()
    return torch.linalg.solve(keys @ moment @ keys.T, keys @ moment).float(), keys.float()


def scores(q: Tensor, k: Tensor, old_q: Tensor, old_k: Tensor) -> dict[str, tuple[float, Tensor, tuple[int, ...]]]:
    """Return the scores of one key head's keys by name: numbers read per key, scores [G, n, S], and sizes of blocks.

    Args:
        q: queries [G, n, D] of the heads that share the keys.
        k: [S, D].
        old_q: [G, N, D] of the other row.
        old_k: [N, D].
    """
    found = {"all channels": (float(k.shape[1]), q @ k.T, SIZES)}
    for count in (4, 6, 8, 12, 16):
        found[f"the query's {count} largest channels"] = (count, largest(q, count) @ k.T, SIZES)
    pooled = largest(q.square().sum(dim=0).sqrt(), 8).bool()
    found["8 channels for the heads of a group"] = (8, (q * pooled) @ k.T, SIZES)
    moment = old_q.square().mean(dim=(0, 1)) * old_k.var(dim=0)
    found["8 channels for all queries"] = (8, (q * largest(moment, 8).bool()) @ k.T, SIZES)
    for count in (4, 8, 16):
        queries, keys = directions(old_q.flatten(0, 1), old_k, count)
        found[f"{count} directions"] = (count, (q @ queries.T) @ (k @ keys.T).T, SIZES)
    middle = old_k.mean(dim=0)
    signs = (k - middle).sign() * (old_k - middle).abs().mean(dim=0)
    found["signs, as many bits as 2 numbers"] = (k.shape[1] / 32, q @ signs.T, SIZES)
    for size in SIZES[1:]:
        blocks = k.unflatten(0, (-1, size))
        mean = (q @ blocks.mean(dim=1).T).repeat_interleave(size, dim=-1)
        found[f"mean key of {size}"] = (k.shape[1] / size, mean, (size,))
        if size == 8:
            odd = (blocks - blocks.mean(dim=1, keepdim=True)).norm(dim=-1).argmax(dim=1)
            odd = (q @ blocks[torch.arange(len(blocks)), odd].T).repeat_interleave(size, dim=-1)
            found["mean key of 8, and the key farthest from it"] = (
                2 * k.shape[1] / size,
                torch.maximum(mean, odd),
                (size,),
            )
    return found


def chosen(score: Tensor, candidates: Tensor, size: int, keys: int) -> Tensor:
    """Return which keys [G, n, S] are in the blocks of the highest score, given scores and candidates [n, S]."""
    best = score.masked_fill(~candidates, -math.inf).unflatten(2, (-1, size)).amax(dim=-1)
    top = best.topk(keys // size, dim=-1)
    return (
        torch.zeros_like(best, dtype=torch.bool)
        .scatter(-1, top.indices, top.values > -math.inf)
        .repeat_interleave(size, dim=2)
    )


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original", help="SmolLM2-135M-Instruct's GGUF file")
    parser.add_argument("--text", required=True, help="text to choose a score on")
    parser.add_argument("--keys", type=int, default=272, help="keys that each query chooses")
    parser.add_argument("--output", required=True)
    args = parser.parse_args(words)
    check_file(args.output, "--output", (".json",), overwrite=True)
    return args


@torch.no_grad()
def main(words: list[str] | None = None) -> None:
    """Measure the shares and write them."""
    args = parse(words)
    source = Path(args.original)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32).eval()
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        if module.layer_idx in LAYERS:
            kept[module.layer_idx] = q[0].clone(), k[0].clone()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    AttentionInterface.register("keeping", attend)
    model.set_attn_implementation("keeping")
    ids = torch.tensor(tokenizer(Path(args.text).read_text(encoding="utf-8"))["input_ids"])
    draw = torch.Generator().manual_seed(7)
    model.model(ids[None, :LENGTH], use_cache=False)
    old, row = dict(kept), row_with_numbers(tokenizer, ids[100_000:], LENGTH, draw)
    model.model(row["ids"][None], use_cache=False)
    total, got = [0.0, 0.0], dict[str, list[float]]()
    queries, facts = judged(row, draw)
    key = torch.arange(LENGTH)
    candidates = key <= queries[:, None] - WINDOW
    far = candidates & (key >= SINKS)
    of_text = len(queries) - len(facts)
    for layer in LAYERS:
        (q, k), (old_q, old_k), groups = kept[layer], old[layer], len(kept[layer][0]) // len(kept[layer][1])
        for head in range(len(k)):
            some = slice(head * groups, (head + 1) * groups)
            weights = q[some, queries] @ k[head].T * q.shape[2] ** -0.5
            weights = weights.masked_fill(key > queries[:, None], -math.inf).softmax(dim=-1) * far
            answers = weights[:, of_text:] * facts
            total = [total[0] + float(weights[:, :of_text].sum()), total[1] + float(answers.sum())]
            for name, (cost, score, sizes) in scores(q[some, queries], k[head], old_q[some], old_k[head]).items():
                for size in sizes:
                    keys = chosen(score, candidates, size, args.keys)
                    sums = got.setdefault(f"{name}; blocks of {size}", [0.0, 0.0, cost])
                    sums[0] += float((weights * keys)[:, :of_text].sum())
                    sums[1] += float((answers * keys[:, of_text:]).sum())
        print(f"layer {layer}", flush=True)
    shares = {
        name: {"numbers per key": cost, "text": text / total[0], "answers": answers / total[1]}
        for name, (text, answers, cost) in got.items()
    }
    Path(args.output).write_text(json.dumps(shares, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(shares, indent=1))


def judged(row: dict[str, Tensor], draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return 192 places of text after the first 1,024 tokens, then those before the answers' tokens; and their facts.

    The facts are the keys [n, L] of the sentence with the number that a token of an answer is about.
    """
    starts = (row["text"][:-1] & ~row["text"][1:]).nonzero()[:, 0] + 1
    ends = (~row["text"][:-1] & row["text"][1:]).nonzero()[:, 0] + 1
    answers, places, facts = row["answers"].tolist(), [], []
    for number, (first, last) in enumerate(answers):
        places.append(torch.arange(first - 1, last - 1))
        fact = torch.zeros(last - first, len(row["ids"]), dtype=torch.bool)
        fact[:, int(starts[number]) : int(ends[number])] = True
        facts.append(fact)
    text = row["text"].nonzero()[:, 0]
    text = text[text >= 1024]
    text = text[torch.randperm(len(text), generator=draw)[:192]].sort().values
    return torch.cat([text, *places]), torch.cat(facts)


if __name__ == "__main__":
    main()
