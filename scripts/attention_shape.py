"""Measure how spiky attention weights are, and how well they keep the order of softmax's: Hedgehog's two properties.

    python scripts/attention_shape.py elu=DIR hedgehog=DIR --text text.txt --output shape.json

Hedgehog (https://arxiv.org/abs/2402.04347, section 2) explains the gap of linear attention by weights whose entropy is
too high and that do not rise with the product of query and key. Both are measured on the converted models' own queries
and keys: entropy in nats per query, and Spearman's rank correlation, over the keys of a query, of its weights with its
products. Softmax has a correlation of 1. Negative weights count as 0 in the entropy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import linearize  # noqa: F401  (so that Auto classes load converted models)
from linearize.cli._options import NamedFolders
from linearize.core.parsing import check_file
from linearize.fidelity.maps import attention_maps


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "converted", nargs="+", metavar="NAME=DIR", action=NamedFolders, help="conversions of one encoder"
    )
    parser.add_argument("--text", required=True, help="plain text that was not used in training")
    parser.add_argument("--length", type=int, default=128, help="tokens per row (%(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="rows (%(default)s)")
    parser.add_argument("--output", required=True, help="JSON file")
    args = parser.parse_args(words)
    check_file(args.output, "--output", (".json",), overwrite=True)
    return args


def entropy(weights: Tensor) -> Tensor:
    """Return the mean entropy, in nats, of the rows of weights [..., T]; negative ones count as 0."""
    shares = weights.double().clamp(min=0.0)
    shares = shares / shares.sum(dim=-1, keepdim=True).clamp(min=1e-30)
    return -torch.xlogy(shares, shares).sum(dim=-1).mean()


def order(weights: Tensor, softmax: Tensor) -> Tensor:
    """Return Spearman's rank correlation between the rows of two tensors [..., T], averaged over the rows."""
    # In fp32 softmax has ties among the smallest weights only.
    ranks = [x.argsort(dim=-1).argsort(dim=-1).double() for x in (weights, softmax)]
    one, other = (x - x.mean(dim=-1, keepdim=True) for x in ranks)
    return ((one * other).sum(dim=-1) / (one.norm(dim=-1) * other.norm(dim=-1))).mean()


def main(words: list[str] | None = None) -> None:
    """Measure all models and write the file."""
    args = parse(words)
    text = Path(args.text).read_text(encoding="utf-8")
    results: dict[str, dict[str, float]] = {}
    for name, folder in args.converted.items():
        model = AutoModel.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = tokenizer(text, truncation=True, max_length=args.length, return_overflowing_tokens=True)["input_ids"]
        # The last row is shorter.
        if len(rows) <= args.rows:
            raise SystemExit(
                f"text: got {len(rows) - 1} rows of {args.length:,} tokens, expected {args.rows}; add text"
            )
        maps = [x for row in rows[: args.rows] for x in attention_maps(model, {"input_ids": torch.tensor([row])})]
        figures = [(entropy(x.linear), entropy(x.softmax), order(x.linear, x.softmax)) for x in maps]
        linear, softmax, correlation = torch.tensor(figures).mean(dim=0).tolist()
        results[name] = {"entropy": linear, "softmax_entropy": softmax, "rank_correlation": correlation}
        print(f"{name:24} entropy {linear:.2f} (softmax {softmax:.2f}), rank correlation {correlation:.2f}")
    shown = {"text": Path(args.text).name, "rows": args.rows, "tokens": args.length, "results": results}
    Path(args.output).write_text(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
