"""Train an embedder to find facts hidden in documents, and count the other facts that it then finds.

    python scripts/train_needles.py MINILM "chunks of 512, averaged" --chunk 512 --data wikitext2 --output needles
    python scripts/train_needles.py converted "hedgehog, read whole" --data wikitext2 --output needles

Every row is trained in the same way: a question has to find its document among those of the batch (InfoNCE), with all
weights trained. Facts, places, names and articles for training differ from those that are measured, which are the 50
documents of `proof-minilm-long` at each depth (`linearize.jobs.synthetic.texts`). The output folder keeps the trained
models and `results.json`; rows in it are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoTokenizer

import linearize  # noqa: F401  (so that Auto classes load converted models)
from linearize.jobs.synthetic.texts import Needles
from linearize.training.stage_two.metrics import part_ranks, ranks

TOPICS = (
    ("The mayor of {place} is {name}.", "Who is the mayor of {place}?"),
    ("A bus runs from {place} every {number} minutes.", "How often does a bus leave {place}?"),
    ("{name} owns the only bakery in {place}.", "Who owns the bakery in {place}?"),
    ("The bridge at {place} was built in {number}.", "When was the bridge at {place} built?"),
    ("At {place}, {name} teaches the violin.", "Who teaches the violin at {place}?"),
    ("{place} has {number} inhabitants.", "How many people live in {place}?"),
    ("The statue in {place} shows {name}.", "Whom does the statue in {place} show?"),
    ("{name} was born in a barn near {place}.", "Who was born near {place}?"),
    ("The market of {place} opens at {number} sharp.", "When does the market of {place} open?"),
    ("The bishop of {place} owes {name} a horse.", "To whom does the bishop of {place} owe a horse?"),
    ("In {place}, {name} repairs watches on Sundays.", "Who repairs watches in {place}?"),
    ("The well of {place} is {number} feet deep.", "How deep is the well of {place}?"),
    ("{name} painted the ceiling of the church in {place}.", "Who painted the church ceiling in {place}?"),
    ("The school of {place} teaches {number} pupils.", "How many pupils has the school of {place}?"),
    ("The owl of {place} was tamed by {name}.", "Who tamed the owl of {place}?"),
    ("The road to {place} costs a toll of {number}.", "What is the toll of the road to {place}?"),
)
"""Facts to train on, with their questions; none is one of those that are measured."""
PLACES = [first + last for first in (
    "Ash", "Black", "Cold", "Deep", "East", "Fair", "Green", "High", "Kings", "Lang", "Mill", "North", "Oak", "Red",
    "Stone", "Thorn", "Under", "West") for last in (
    "bury", "ton", "ham", "ley", "worth", "field", "bridge", "combe", "dale", "port", "thorpe", "gate", "well", "moor",
)]  # fmt: skip
NAMES = [f"{first} {last}" for first in (
    "Paul", "Maria", "Ivan", "Lena", "Oscar", "Tilda", "Viktor", "Wanda") for last in (
    "Brandt", "Keller", "Novak", "Rossi", "Silva", "Dunne", "Fisher", "Gray", "Hahn", "Ivers", "Jansen", "Krol",
)]  # fmt: skip
MEASURED = {"512 tokens": 380, "2,048 tokens": 1550, "8,192 tokens": 6200}
"""Words of the measured documents, with about as many tokens of MiniLM."""
SHORTEST, HELD = 1000, 0.4
"""Words of the shortest article, and the share of the articles that is measured, as in the recipe."""
TEMPERATURE, WARM_UP = 0.05, 10


class Embedder:
    """Embeds texts by the mean of their tokens' states; in chunks, by the mean over the chunks' embeddings."""

    def __init__(self, folder: str, chunk: int | None) -> None:
        # Linear attention has no dropout, so softmax has none here either.
        self.model: Any = AutoModel.from_pretrained(folder, attention_probs_dropout_prob=0.0)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.model_max_length = 10**9
        self.chunk = chunk

    def __call__(self, texts: list[str]) -> Tensor:
        """Embed texts -> [N, D]."""
        if self.chunk is None:
            return self.read(self.tokenizer(texts)["input_ids"])
        return torch.stack([self.chunks(text).mean(dim=0) for text in texts])

    def chunks(self, text: str) -> Tensor:
        """Embed the chunks of a text -> [chunks, D]."""
        ids, size = self.tokenizer(text, add_special_tokens=False)["input_ids"], (self.chunk or 0) - 2
        first, last = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        pieces = [[first, *ids[begin : begin + size], last] for begin in range(0, len(ids), size)]
        # One by one: without padding, SDPA needs no mask, and less memory.
        return torch.cat([self.read([piece]) for piece in pieces])

    def read(self, rows: list[list[int]]) -> Tensor:
        """Embed rows of tokens -> [N, D]."""
        fields = self.tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        states, mask = self.model(**fields).last_hidden_state, fields["attention_mask"][..., None]
        return (states * mask).sum(dim=1) / mask.sum(dim=1)


def documents(words: list[str], count: int, size: int, chance: np.random.Generator) -> tuple[list[str], list[str]]:
    """Hide one fact each in `count` stretches of `size` words -> questions and documents."""
    questions, texts = [], []
    for place in chance.choice(PLACES, count, replace=False):
        fact, question = TOPICS[chance.integers(len(TOPICS))]
        details = {"place": place, "name": chance.choice(NAMES), "number": chance.integers(10, 10_000)}
        begin, depth = chance.integers(len(words) - size), chance.integers(size + 1)
        stretch = words[begin : begin + size]
        questions.append(question.format(**details))
        texts.append(" ".join([*stretch[:depth], fact.format(**details), *stretch[depth:]]))
    return questions, texts


def train(embedder: Embedder, args: argparse.Namespace) -> list[float]:
    """Train all weights, and return the loss of every step."""
    articles = Needles(shortest=SHORTEST, held=HELD).joined(args.data)["train"]
    words, chance = [word for text in articles for word in text.split()], np.random.default_rng(args.seed)
    torch.manual_seed(args.seed)
    optimizer = torch.optim.AdamW(embedder.model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    embedder.model.train()
    losses = []
    for step in range(args.steps):
        rate = args.learning_rate * min(1.0, (step + 1) / WARM_UP) * (1 - step / args.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        questions, texts = documents(words, args.batch_size, args.words, chance)
        cosines = normalize(embedder(questions), dim=-1) @ normalize(embedder(texts), dim=-1).T / TEMPERATURE
        labels = torch.arange(args.batch_size)
        loss = (cross_entropy(cosines, labels) + cross_entropy(cosines.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(embedder.model.parameters(), 1.0)
        optimizer.step()
        losses.append(round(float(loss.detach()), 4))
        print(f"step {step + 1}/{args.steps}: loss {losses[-1]}", flush=True)
    embedder.model.eval()
    return losses


@torch.no_grad()
def measure(embedder: Embedder, data: str, words: int) -> dict[str, Any]:
    """Search for the document of each question -> the rank of each, and the rank by the best chunk."""
    rows = Needles(shortest=SHORTEST, held=HELD, words=words).make(data)["validation"]
    questions = torch.cat([embedder([str(row["question"])]) for row in rows])
    read = (lambda text: embedder([text])) if embedder.chunk is None else embedder.chunks
    parts = [read(str(row["text"])) for row in track(rows, f"{words} words")]
    found = {"": ranks(questions.numpy(), torch.stack([part.mean(dim=0) for part in parts]).numpy())}
    if embedder.chunk is not None:
        padded = pad_sequence(parts, batch_first=True, padding_value=math.nan)
        found["_by_best_chunk"] = part_ranks(questions[:, None].numpy(), padded.numpy())
    figures: dict[str, Any] = {f"ranks{how}": [int(rank) for rank in order] for how, order in found.items()}
    return {**figures, **{f"found{how}": int((order == 1).sum()) for how, order in found.items()}}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of an embedder, converted or not, that pools by the mean")
    parser.add_argument("row", help="name of the row in the results")
    parser.add_argument("--chunk", type=int, help="read documents in chunks of so many tokens; default: whole")
    parser.add_argument("--data", required=True, help="folder of WikiText-2, with train and validation")
    parser.add_argument("--words", type=int, default=760, help="words of the training documents (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="training steps (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="documents per step (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="highest learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the training documents (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results and the trained models")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    """Train one row, unless its trained model is there; measure the lengths that are missing."""
    args = parse(words)
    results, folder = args.output / "results.json", args.output / args.row
    args.output.mkdir(parents=True, exist_ok=True)
    embedder = Embedder(str(folder if folder.exists() else args.model), args.chunk)
    embedder.model.eval()
    losses = None
    if args.steps and not folder.exists():
        losses = train(embedder, args)
        unfinished = args.output / f"{args.row}.unfinished"
        for part in (embedder.model, embedder.tokenizer):
            part.save_pretrained(unfinished)
        unfinished.rename(folder)
    for name, count in MEASURED.items():
        done = json.loads(results.read_text()) if results.exists() else {}
        row = done.setdefault(args.row, {})
        if losses is not None:
            row |= {"losses": losses, "seed": args.seed, "words": args.words, "chunk": args.chunk}
        if name not in row:
            row[name] = measure(embedder, args.data, count)
        unfinished = results.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(done, indent=1))
        unfinished.rename(results)
        print(args.row, name, row[name])


if __name__ == "__main__":
    main()
