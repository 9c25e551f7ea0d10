"""Measure search over whole documents: which vectors find a document by one of its sentences, and by its topic?

    python scripts/search_documents.py MINILM minilm-long --dataset imdb_long/test.jsonl.gz --output found.json

The documents are reviews of 700 to 1,331 tokens. A sentence query is a sentence that begins after token 512. A topic
query is the eight words of a review with the largest TF-IDF. A document's score is the largest product of the query's
vector with one of its vectors. The original reads each review cut, and in chunks; each converted folder reads it whole,
and its spans have the chunks' length. Seconds are those of the processor.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import linearize
from linearize.core.parsing import user_path
from linearize.data import DataConfig
from linearize.data.load import open_records

SHORTEST, LONGEST, AFTER = 700, 1331, 512
WORDS = 8
SENTENCE = re.compile(r"[^.!?]+[.!?]+")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original", help="sentence embedder with softmax")
    parser.add_argument("models", nargs="+", help="converted folders of it")
    parser.add_argument("--dataset", required=True, help="texts: a local file or folder, or a Hub data set")
    parser.add_argument("--split", default="test")
    parser.add_argument("--count", type=int, default=80, help="documents")
    parser.add_argument("--span", type=int, default=128, help="tokens per chunk and span")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", required=True, help="JSON file")
    return parser.parse_args(words)


def documents(args: argparse.Namespace, tokenizer: Any) -> list[tuple[str, np.ndarray]]:
    """Return the texts with the characters of their tokens [n, 2]."""
    records, _ = open_records(args.dataset, DataConfig(args.dataset, split=args.split, text_column="text"), "text")
    chance, found = np.random.default_rng(args.seed), []
    for row in chance.permutation(len(records.sizes)).tolist():
        text = " ".join(records.fetch([row])[0].value.replace("<br />", " ").split())
        offsets = np.array(tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"])
        late = [one for one in SENTENCE.finditer(text) if len(offsets) > AFTER and one.start() >= offsets[AFTER, 0]]
        if SHORTEST <= len(offsets) <= LONGEST and any(8 <= len(one[0].split()) <= 40 for one in late):
            found.append((text, offsets))
        if len(found) == args.count:
            return found
    raise SystemExit(f"got {len(found)} documents of {SHORTEST} to {LONGEST} tokens, expected {args.count}")


def queries(texts: Sequence[tuple[str, np.ndarray]], seed: int) -> dict[str, list[str]]:
    """Return a sentence and a topic per document."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    chance, sentences = np.random.default_rng([seed, 1]), []
    for text, offsets in texts:
        late = [one[0].strip() for one in SENTENCE.finditer(text) if one.start() >= offsets[AFTER, 0]]
        fitting = [one for one in late if 8 <= len(one.split()) <= 40]
        sentences.append(fitting[int(chance.integers(len(fitting)))])
    words = TfidfVectorizer(stop_words="english", token_pattern=r"[A-Za-z]{3,}")
    weights = words.fit_transform([text for text, _ in texts]).toarray()
    names = words.get_feature_names_out()
    return {"sentence": sentences, "topic": [" ".join(names[row.argsort()[::-1][:WORDS]]) for row in weights]}


def ranks(asked: np.ndarray, vectors: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Return the rank [N], from 1, of each query's document by its best vector; ties count against it."""
    scores = asked @ vectors.T
    best = np.stack([scores[:, owners == owner].max(axis=1) for owner in range(len(asked))], axis=1)
    return (best >= np.diag(best)[:, None]).sum(axis=1)


def measured(name: str, vectors: np.ndarray, owners: np.ndarray, asked: dict[str, np.ndarray], seconds: float) -> Any:
    """Return the figures of one side."""
    row: dict[str, Any] = {"side": name, "vectors_per_document": len(owners) / len(set(owners.tolist()))}
    for kind, queries in asked.items():
        found = ranks(queries, vectors, owners)
        row[kind] = {"recall_1": 100 * float((found == 1).mean()), "recall_10": 100 * float((found <= 10).mean())}
    return row | {"processor_seconds_per_document": round(seconds / len(set(owners.tolist())), 3)}


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return a call's result and its processor seconds."""
    start = time.process_time()
    return call(), time.process_time() - start


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure all sides and write them."""
    from sentence_transformers import SentenceTransformer

    args = parse(words)
    original = SentenceTransformer(str(user_path(args.original)), device="cpu")
    original.max_seq_length = AFTER
    texts = documents(args, original.tokenizer)
    plain, every = [text for text, _ in texts], np.arange(len(texts))
    asked = queries(texts, args.seed)
    sides = []

    def embedded(model: Any) -> dict[str, np.ndarray]:
        return {kind: model.encode(one, normalize_embeddings=True) for kind, one in asked.items()}

    def note(*side: Any) -> None:
        sides.append(measured(*side))
        print(json.dumps(sides[-1]), flush=True)

    for folder in args.models:
        model, name = SentenceTransformer(str(user_path(folder)), device="cpu"), Path(folder).name
        own = embedded(model)
        found, seconds = timed(lambda model=model: linearize.embed(model, plain, spans=args.span))
        note(f"{name}, whole", found.documents["vector"], every, own, seconds)
        note(f"{name}, spans of {args.span}", found.spans["vector"], found.spans["document"], own, seconds)
        note(f"{name}, whole and spans", found.rows["vector"], found.rows["document"], own, seconds)
    own = embedded(original)
    chunks, owners = [], []
    for owner, (text, offsets) in enumerate(texts):
        for begin in range(0, len(offsets), args.span):
            last = min(begin + args.span, len(offsets)) - 1
            chunks.append(text[offsets[begin, 0] : offsets[last, 1]])
            owners.append(owner)
    vectors, seconds = timed(lambda: original.encode(chunks, normalize_embeddings=True))
    which = np.array(owners)
    note(f"original, chunks of {args.span}", vectors, which, own, seconds)
    means = np.stack([vectors[which == owner].mean(axis=0) for owner in every])
    note(
        f"original, mean of its chunks of {args.span}",
        means / np.linalg.norm(means, axis=1)[:, None],
        every,
        own,
        seconds,
    )
    vectors, seconds = timed(lambda: original.encode(plain, normalize_embeddings=True))
    note(f"original, cut at {AFTER}", vectors, every, own, seconds)
    values = {
        "what": f"{len(texts)} documents of {SHORTEST} to {LONGEST} tokens; one sentence after token {AFTER}, and "
        f"{WORDS} words, as queries for each",
        "dataset": "/".join(Path(args.dataset).parts[-2:]),
        "seed": args.seed,
        "tokens": int(sum(len(offsets) for _, offsets in texts)),
        "sides": sides,
    }
    Path(args.output).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return values


if __name__ == "__main__":
    main()
