"""Put text about something else between the two sentences of each pair, so that only far tokens decide.

    python scripts/pairs_apart.py MRPC WIKI --words 190 --output pairs-apart

MRPC is a folder with train and test (.jsonl or .jsonl.gz) of pairs `sentence1`, `sentence2` and their `label`; WIKI one
with train.txt.gz and test.txt.gz. A row's `text` is the first sentence, a stretch of text of the same split, and the
second sentence. A part of a text that has one sentence only says nothing about the label, however many are averaged.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import pandas as pd


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path, help="folder with the pairs")
    parser.add_argument("filler", type=Path, help="folder with the text to put between them")
    parser.add_argument("--words", type=int, default=190, help="words between the sentences")
    parser.add_argument("--output", type=Path, required=True, help="folder, which must not exist")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    """Write train.jsonl and test.jsonl into the --output folder."""
    args = parse(words)
    args.output.mkdir(parents=True)
    for split in ("train", "test"):
        with gzip.open(args.filler / f"{split}.txt.gz", "rt", encoding="utf-8") as file:
            hay = file.read().split()
        pairs = pd.read_json(next(args.pairs.glob(f"{split}.jsonl*")), lines=True)
        with (args.output / f"{split}.jsonl").open("w", encoding="utf-8") as out:
            for number, (first, second, label) in enumerate(
                zip(pairs["sentence1"], pairs["sentence2"], pairs["label"], strict=True)
            ):
                # The stretches begin evenly over the text, and overlap where it is short.
                begin = number * (len(hay) - args.words) // len(pairs)
                between = " ".join(hay[begin : begin + args.words])
                row = {"text": f"{first} {between} {second}", "label": int(label)}
                out.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
