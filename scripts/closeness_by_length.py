"""Compare converted encoders with their softmax original at several lengths, also beyond those it was made for.

    python scripts/closeness_by_length.py ORIGINAL --converted window=DIR kernel=DIR --text text.txt --output out.json

The reference is the original's softmax with the positions of the converted model, which may have been extended. Every
row of a length is a different stretch of the text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import linearize  # noqa: F401  (so that Auto classes load converted models)
from linearize.attention.interface import observed
from linearize.cli._options import NamedFolders
from linearize.core.parsing import check_file
from linearize.fidelity.teacher import exact_states


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original", help="folder of the softmax encoder")
    parser.add_argument(
        "--converted", nargs="+", required=True, metavar="NAME=DIR", action=NamedFolders, help="its conversions"
    )
    parser.add_argument("--text", required=True, help="plain text that was not used in training")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], help="in tokens")
    parser.add_argument("--rows", type=int, default=4, help="rows per length (%(default)s)")
    parser.add_argument("--output", required=True, help="JSON file")
    args = parser.parse_args(words)
    check_file(args.output, "--output", (".json",), overwrite=True)
    return args


def reference(original: PreTrainedModel, folder: str) -> PreTrainedModel:
    """Return a conversion with the original's weights wherever their shapes agree: only positions may have changed."""
    model: PreTrainedModel = AutoModel.from_pretrained(folder)
    kept = {name: x.shape for name, x in model.state_dict().items()}
    own = {name: x for name, x in original.state_dict().items() if kept.get(name) == x.shape}
    model.load_state_dict(own, strict=False)
    return model


def closeness(states: Tensor, softmax: Tensor) -> Tensor:
    """Return the relative error of states [1, T, D], the mean cosine of tokens, and the cosine of their means."""
    error = (states - softmax).norm() / softmax.norm()
    tokens = cosine_similarity(states, softmax, dim=-1).mean()
    return torch.stack([error, tokens, cosine_similarity(states.mean(1), softmax.mean(1)).mean()])


def main(words: list[str] | None = None) -> None:
    """Measure all lengths and write the file."""
    args = parse(words)
    softmax = reference(AutoModel.from_pretrained(args.original), next(iter(args.converted.values())))
    models = {name: AutoModel.from_pretrained(folder) for name, folder in args.converted.items()}
    tokenizer = AutoTokenizer.from_pretrained(args.original)
    text = Path(args.text).read_text(encoding="utf-8")
    results: list[dict[str, Any]] = []
    for length in args.lengths:
        sums = {name: torch.zeros(3, dtype=torch.float64) for name in models}
        rows = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
        # The last row is shorter.
        if len(rows) <= args.rows:
            raise SystemExit(f"text: got {len(rows) - 1} rows of {length:,} tokens, expected {args.rows}; add text")
        for row in track(rows[: args.rows], f"{length:,} tokens"):
            batch = {"input_ids": torch.tensor([row])}
            with observed(softmax, lambda *_: None):
                wanted = exact_states(softmax, batch)
            for name, model in models.items():
                found = exact_states(model, batch)
                assert wanted is not None and found is not None, "an encoder returns last hidden states"
                sums[name] += closeness(found, wanted) / args.rows
        for name, (error, tokens, pooled) in ((name, total.tolist()) for name, total in sums.items()):
            results.append({"tokens": length, "row": name, "error": error, "cosine": tokens, "pooled_cosine": pooled})
            print(f"{length:6,} {name:24} error {error:.3f}, cosine of tokens {tokens:.3f}, of the mean {pooled:.3f}")
    Path(args.output).write_text(json.dumps({"text": Path(args.text).name, "rows": args.rows, "results": results}))


if __name__ == "__main__":
    main()
