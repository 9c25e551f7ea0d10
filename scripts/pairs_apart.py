"""Put text about something else between the two sentences of each pair, so that only far tokens decide.

    python scripts/pairs_apart.py MRPC WIKI --words 190 --output pairs-apart

MRPC is a folder with train and test (.jsonl.gz) of pairs `sentence1`, `sentence2` and their `label`; WIKI one with
train.txt.gz and test.txt.gz. A row's `text` is the first sentence, a stretch of text of the same split, and the second
sentence. A part of a text that has one sentence only says nothing about the label, however many parts are averaged.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path


def main(words: list[str] | None = None) -> None:
    """Write train.jsonl and test.jsonl into the --output folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path, help="folder with train.jsonl.gz and test.jsonl.gz")
    parser.add_argument("filler", type=Path, help="folder with train.txt.gz and test.txt.gz")
    parser.add_argument("--words", type=int, default=190, help="words between the sentences")
    parser.add_argument("--output", type=Path, required=True, help="folder, which must not exist")
    args = parser.parse_args(words)
    args.output.mkdir(parents=True)
    for split in ("train", "test"):
        with gzip.open(args.filler / f"{split}.txt.gz", "rt", encoding="utf-8") as file:
            hay = file.read().split()
        with gzip.open(args.pairs / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            pairs = [json.loads(line) for line in file]
        with (args.output / f"{split}.jsonl").open("w", encoding="utf-8") as out:
            for number, pair in enumerate(pairs):
                # The stretches begin evenly over the text, and overlap where it is short.
                begin = number * (len(hay) - args.words) // len(pairs)
                between = " ".join(hay[begin : begin + args.words])
                row = {"text": f"{pair['sentence1']} {between} {pair['sentence2']}", "label": pair["label"]}
                out.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
