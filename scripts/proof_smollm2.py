"""Measure the benefit of each part of a hybrid on a language model, with controls, on the same inputs.

    python scripts/proof_smollm2.py SMOLLM2 --converted narrow=DIR window=DIR unscaled=DIR kernel=DIR exact=DIR \\
        recall=DIR --text test.txt --offset 160000 --output proof.json

SMOLLM2 is the softmax original; the folders are its conversions by `linearize convert` (docs/benchmarks/proof.md has
the commands). `COLUMNS` defines which of them a column uses, and the parts added or removed without further training.
Figures that are already in the --output file are kept, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

import linearize  # noqa: F401  (loads converted checkpoints)
from linearize.attention.interface import linear_attentions
from linearize.checkpoint.loading import load_model, load_processor
from linearize.cli._options import NamedFolders
from linearize.core.parsing import check_file
from linearize.fidelity.ablate import ablated
from linearize.training.stage_two.intervals import RESAMPLES, percentiles

EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BLOCK = 256
"""Tokens per resampling unit of the perplexity's bootstrap."""
NEAR, FAR = 100, 1000
"""A near answer last appeared at most 100 tokens before, a far answer at least 1,000."""
COMMON = 120
"""Words that are more frequent than this in the text are not used as answers."""
NEW_TOKENS = 64
BASES = (
    "softmax",
    "window only",
    "window only, exact keys, softmax heads",
    "window of 256, 64 exact keys, softmax heads",
    "routed, untrained",
)
"""The columns that all others are compared with."""
NAMES = ("harbour", "castle", "garden", "bridge")
QUESTIONS = (
    "Why is the sky blue?",
    "Explain gravity to a child.",
    "Give me a tip for sleeping well.",
    "What is photosynthesis?",
)


ASKED = (
    "What is {}?",
    "Explain {} to a child.",
    "Name facts about {}.",
    "Why does {} matter?",
    "Write about {}.",
)
TOPICS = ("gravity", "photosynthesis", "the Roman Empire", "money", "sleep")
PASSAGE = 500
"""Tokens per passage in questions about passages."""
ANSWERED = 10
"""Chats of each kind that a converted model answers; in all chats it predicts the tokens of the original's answers."""


@dataclass(frozen=True)
class Column:
    """A column of the table: a converted checkpoint, and changes to its layers.

    Attributes:
        folder: its name in --converted; None: the softmax original.
        kernel: whether the kernels are kept.
        hybrid: replacements for values of the layers' `Hybrid`.
        softmax_layers: every n-th layer is softmax; 0: none.
    """

    folder: str | None
    kernel: bool = True
    hybrid: Mapping[str, Any] = field(default_factory=dict)
    softmax_layers: int = 0


COLUMNS = {
    "softmax": Column(None),
    "window only": Column("narrow", kernel=False, hybrid={"exact_keys": 0, "softmax_heads": ()}),
    "kernel only": Column("kernel"),
    "kernel and window, no scales": Column("unscaled"),
    "kernel and window": Column("window"),
    "kernel and window, exact keys": Column("exact"),
    "kernel and window, exact keys, softmax heads": Column("narrow"),
    "window only, exact keys, softmax heads": Column("narrow", kernel=False),
    "kernel, window of 256, 64 exact keys, softmax heads": Column("recall"),
    "window of 256, 64 exact keys, softmax heads": Column("recall", kernel=False),
    "windows per layer, untrained": Column("layers-untrained"),
    "windows per layer": Column("layers"),
    "windows per layer, no kernel": Column("layers", kernel=False),
    "windows per layer, aligned": Column("layers-aligned"),
    "windows per layer, no kernel, aligned": Column("silent-aligned"),
    "kernel and window, one softmax layer of six": Column("window", softmax_layers=6),
    "routed, untrained": Column("routed"),
    "routed 272, untrained": Column("routed", hybrid={"routed_blocks": "272"}),
    "routed and kernel": Column("routed-kernel"),
    "routed and kernel, window only": Column("routed-kernel", kernel=False, hybrid={"routed_blocks": ""}),
}


@contextmanager
def column_of(model: Any, column: Column) -> Iterator[None]:
    """Change a converted model's layers to those of a column inside the block."""
    mixers: list[Any] = [layer.mixer for layer in linear_attentions(model).values()]
    before = [mixer.hybrid for mixer in mixers]
    for place, mixer in enumerate(mixers, start=1):
        values = dict(column.hybrid)
        if column.softmax_layers and place % column.softmax_layers == 0:
            values["softmax_heads"] = tuple(range(mixer.shape.heads))
        mixer.change(replace(mixer.hybrid, **values))
    try:
        with nullcontext() if column.kernel else ablated(model, "kernel"):
            yield
    finally:
        for mixer, hybrid in zip(mixers, before, strict=True):
            mixer.change(hybrid)


@torch.no_grad()
def logits(model: Any, ids: Tensor, last: int = 0) -> Tensor:
    """Return the logits [T, vocabulary] of one row [T], or of its last tokens, on the CPU."""
    result: Tensor = model(ids[None].to(model.device), use_cache=False, logits_to_keep=last).logits[0]
    return result.cpu()


def cloze_items(ids: Tensor, rows: int, length: int, tokens: Sequence[str], most: int) -> list[list[Any]]:
    """Return cloze questions about the next word: [row, place, kind, the word and three others].

    The answer is a one-token word that appeared earlier in the row, most recently at most `NEAR` or at least `FAR`
    tokens before. The other three are words of the text with similar frequency and the same case that have not appeared
    in the row so far. All words have one token, so that their likelihoods are directly comparable.

    Args:
        ids: [N] tokens of the text.
        rows: number of rows to use, from the beginning.
        length: tokens per row.
        tokens: the vocabulary in byte-level BPE notation.
        most: maximum number of questions of each kind, drawn evenly over the rows.
    """
    count = Counter(ids.tolist())
    words = [i for i in count if len(w := tokens[i]) > 4 and w[0] == "Ġ" and w[1:].isascii() and w[1:].isalpha()]
    pools: dict[bool, list[int]] = {False: [], True: []}
    for word in sorted((word for word in words if count[word] <= COMMON), key=lambda word: (count[word], word)):
        pools[tokens[word][1].isupper()].append(word)
    ranks = {word: rank for pool in pools.values() for rank, word in enumerate(pool)}
    questions: dict[str, list[list[Any]]] = {"near": [], "far": []}
    for number, row in enumerate(ids[: rows * length].view(rows, length).tolist()):
        last: dict[int, int] = {}
        for place, word in enumerate(row[:-1]):
            begins = not tokens[row[place + 1]][0].isalpha() or tokens[row[place + 1]][0] == "Ġ"
            back = place - last.get(word, place)
            if word in ranks and begins and (0 < back <= NEAR or back >= FAR):
                pool, rank = pools[tokens[word][1].isupper()], ranks[word]
                like = (pool[r] for d in range(1, len(pool)) for r in (rank - d, rank + d) if 0 <= r < len(pool))
                kind = "near" if back <= NEAR else "far"
                others = itertools.islice((other for other in like if other not in last), 3)
                questions[kind].append([number, place, kind, [word, *others]])
            last[word] = place
    return [of[k * len(of) // min(most, len(of))] for of in questions.values() for k in range(min(most, len(of)))]


def reading(model: Any, rows: Tensor, items: Sequence[Sequence[Any]] = ()) -> dict[str, Any]:
    """Return the loss on rows [R, L] by position and by block of `BLOCK` tokens, and the results of cloze questions."""
    edges = [edge for edge in EDGES if edge <= rows.shape[1]]
    parts, blocks, right = [], [], {"near": "", "far": ""}
    for number, row in enumerate(rows):
        predicted = logits(model, row)
        pairs = zip(predicted[:-1].split(BLOCK), row[1:].split(BLOCK), strict=True)
        loss = torch.cat([torch.zeros(1), *(F.cross_entropy(a, b, reduction="none") for a, b in pairs)])
        parts.append([float(loss[max(1, a) : b].mean()) for a, b in itertools.pairwise(edges)])
        blocks.append([round(float(part.sum()), 3) for part in loss.split(BLOCK)])
        for _, place, kind, words in (item for item in items if item[0] == number):
            scores = predicted[place - 1, words]
            right[kind] += str(int(scores[0] > scores[1:].max()))
    nats = {f"{a}-{b - 1}": sum(of) / len(of) for (a, b), of in zip(itertools.pairwise(edges), zip(*parts, strict=True),
                                                                      strict=True)}  # fmt: skip
    mean = sum(map(sum, blocks)) / (len(rows) * (rows.shape[1] - 1))
    figures = {"perplexity": math.exp(mean), "nats": nats, "tokens": rows.shape[1] - 1, "blocks": blocks}
    return figures | ({"right": right} if items else {})


def copying(model: Any, passages: Tensor) -> dict[str, Any]:
    """Return the share of tokens in passages [R, L] that are predicted correctly when a passage is read again."""
    right = []
    for passage in passages:
        predicted = logits(model, torch.cat([passage, passage]), last=len(passage)).argmax(dim=-1)
        right.append(float((predicted[:-1] == passage[1:]).float().mean()))
    return {"share": sum(right) / len(right), "rows": [round(x, 4) for x in right]}


def needles(model: Any, tokenizer: Any, ids: Tensor, length: int, count: int, names: Sequence[str]) -> str:
    """Hide five-digit numbers in rows of text, ask for all of them, and return "1" or "0" for each answer.

    With one name, the number is at a different depth in each row. With several names, each row has as many numbers,
    evenly spaced; the questions follow in the same order, each after the previous answer.
    """
    draw = torch.Generator().manual_seed(0)

    def code(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    right = ""
    for number in range(count):
        secrets = ["".join(map(str, torch.randint(10, (5,), generator=draw).tolist())) for _ in names]
        pairs = list(zip(names, secrets, strict=True))
        facts = [code(f" The secret number of the {name} is {secret} .") for name, secret in pairs]
        asked = [(code(f" The secret number of the {name} is "), code(secret)) for name, secret in pairs]
        end = [token for question, answer in asked for token in (*question, *answer)]
        fill = length - len(end) - sum(map(len, facts))
        hay = ids[number * fill : (number + 1) * fill].tolist()
        row: list[int] = []
        depths = [(number + 0.5) / count] if len(names) == 1 else [(i + 0.5) / len(names) for i in range(len(names))]
        begin = 0
        for depth, fact in zip(depths, facts, strict=True):
            row += [*hay[begin : int(depth * fill)], *fact]
            begin = int(depth * fill)
        predicted = logits(model, torch.tensor([*row, *hay[begin:], *end]), last=len(end) + 1).argmax(dim=-1).tolist()
        place = 0
        for question, answer in asked:
            place += len(question)
            right += str(int(predicted[place : place + len(answer)] == answer))
            place += len(answer)
    return right


def in_template(tokenizer: Any, question: str) -> Tensor:
    """Return a question in the chat template as a row [1, T]."""
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    row: Tensor = prompt if torch.is_tensor(prompt) else prompt["input_ids"]
    return row


def prompts(tokenizer: Any, passages: Tensor) -> list[Tensor]:
    """Return questions in the chat template, and passages [R, L] to continue, as rows [1, T]."""
    return [*(in_template(tokenizer, question) for question in QUESTIONS), *passages[:, None]]


@torch.no_grad()
def generations(model: Any, tokenizer: Any, rows: Sequence[Tensor]) -> dict[str, Any]:
    """Return greedy answers of `NEW_TOKENS` tokens, as tokens and as text."""
    tokens = []
    for row in rows:
        limits = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": tokenizer.eos_token_id}
        given = {"input_ids": row.to(model.device), "attention_mask": torch.ones_like(row).to(model.device)}
        out = model.generate(**given, do_sample=False, **limits)
        tokens.append(out[0, row.shape[1] :].tolist())
    return {"tokens": tokens, "texts": [tokenizer.decode(answer) for answer in tokens]}


def chats(tokenizer: Any, passages: Tensor) -> list[Tensor]:
    """Return chats as rows [1, T]: short questions, then one question about each of the passages [R, L]."""
    short = [question.format(topic) for topic in TOPICS for question in ASKED]
    long = [f"What is the following text about?\n\n{tokenizer.decode(passage)}" for passage in passages]
    return [in_template(tokenizer, question) for question in (*short, *long)]


def answers(model: Any, tokenizer: Any, rows: Sequence[Tensor], original: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a model's answers to chats, and how often it predicts the next token of the original's answers.

    The original (`original` is None) answers all chats, a converted model the first `ANSWERED` of each kind.
    """
    if original is None:
        return generations(model, tokenizer, rows)
    half = len(rows) // 2
    read = [i for i in range(len(rows)) if i % half < ANSWERED]
    own = generations(model, tokenizer, [rows[i] for i in read])
    right = []
    for row, answer in zip(rows, original["tokens"], strict=True):
        ids = torch.tensor([*row[0].tolist(), *answer])
        predicted = logits(model, ids, last=len(answer) + 1).argmax(dim=-1).tolist()
        right.append(sum(map(int.__eq__, predicted[:-1], answer)) / len(answer))
    same = same_tokens(own["tokens"], [original["tokens"][i] for i in read])
    kinds = {"short": slice(half), "long": slice(half, None)}
    return own | {
        "same": {"short": sum(same[:ANSWERED]) / ANSWERED, "long": sum(same[ANSWERED:]) / ANSWERED},
        "next": {kind: sum(right[part]) / half for kind, part in kinds.items()},
        "next_rows": [round(x, 4) for x in right],
    }


def same_tokens(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[float]:
    """Return, for every answer, the share of positions with the same token."""
    return [sum(map(int.__eq__, a, b)) / NEW_TOKENS for a, b in zip(ours, theirs, strict=True)]


def same_weights(original: Any, model: Any) -> tuple[int, int]:
    """Return how many of the original's tensors are bit-identical in a converted model, and how many there are."""
    ours, theirs = model.state_dict(), original.state_dict()
    return sum(name in ours and torch.equal(ours[name], value) for name, value in theirs.items()), len(theirs)


def wilson(right: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    z, p = 1.959964, right / count
    middle, half = p + z * z / (2 * count), z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return max(0.0, (middle - half) / (1 + z * z / count)), min(1.0, (middle + half) / (1 + z * z / count))


def difference(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return the mean difference of paired figures and its 95 % bootstrap interval."""
    values = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    return {"value": float(values.mean()), "interval": percentiles(values[drawn].mean(axis=1))}


def units(figures: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the bootstrap's units by figure: blocks in nats per token, questions, passages."""
    found: dict[str, list[float]] = {}
    for name, of in figures.items():
        if "blocks" in of:
            found[f"nats, {name}"] = [x * len(row) / of["tokens"] for row in of["blocks"] for x in row]
            for kind, right in of.get("right", {}).items():
                found[f"cloze, {kind}"] = [float(x) for x in right]
        elif name == "copying":
            found[name] = of["rows"]
        elif name == "generations" and "same" in of:
            found["same tokens"] = of["same"]
    return found


def compare(table: Mapping[str, Mapping[str, Any]], bases: Sequence[str] = BASES) -> dict[str, Any]:
    """Return the paired differences between all columns and the base columns."""
    result: dict[str, Any] = {}
    for name, figures in table.items():
        for base in (base for base in bases if base in table and base != name):
            ours, theirs = units(figures), units(table[base])
            result.setdefault(name, {})[base] = {
                figure: difference(ours[figure], theirs[figure]) for figure in ours if figure in theirs
            }
    return result


def shares(table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the shares of needles that were found, with intervals."""
    return {
        name: {what: {"share": of.count("1") / len(of), "interval": wilson(of.count("1"), len(of))}
               for what, of in figures.items() if isinstance(of, str)}
        for name, figures in table.items()
    }  # fmt: skip


def write(output: Path, done: dict[str, Any]) -> None:
    """Write all figures, with the comparisons between them."""
    table = done["columns"]
    theirs = table.get("softmax", {}).get("generations")
    for ours in (figures["generations"] for figures in table.values() if theirs and "generations" in figures):
        ours["same"] = same_tokens(ours["tokens"], theirs["tokens"])
    done |= {"needles": shares(table), "differences": compare(table)}
    output.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original")
    parser.add_argument(
        "--converted", nargs="+", required=True, metavar="NAME=DIR", action=NamedFolders, help="checkpoints by name"
    )
    parser.add_argument("--text", required=True, help="text to measure on")
    parser.add_argument("--offset", type=int, default=0, help="first token to measure on")
    parser.add_argument("--rows", type=int, default=8, help="rows of 1,024 tokens, and passages to copy")
    parser.add_argument("--length", type=int, default=1024, help="tokens per row of these rows")
    parser.add_argument("--long-rows", type=int, default=2)
    parser.add_argument("--long-length", type=int, default=8192)
    parser.add_argument("--cloze", type=int, default=300, help="maximum questions of each kind, in the long rows")
    parser.add_argument("--needles", type=int, nargs="*", default=[1024], help="lengths")
    parser.add_argument("--needle-rows", type=int, default=10)
    parser.add_argument("--columns", nargs="*", choices=COLUMNS, default=list(COLUMNS), help="columns; by default all")
    parser.add_argument("--only", nargs="*", help="figures to measure; by default all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", required=True)
    args = parser.parse_args(words)
    names = sorted({column.folder for column in COLUMNS.values() if column.folder})
    if wrong := [name for name in args.converted if name not in names]:
        parser.error(f"converted: got the name {wrong[0]!r}, expected one of {', '.join(names)}")
    check_file(args.output, "--output", (".json",), overwrite=True)
    return args


def main(words: list[str] | None = None) -> None:
    """Measure and write the figures; those already in the --output file are kept."""
    args = parse(words)
    # The original may be a GGUF file.
    tokenizer = load_processor(args.original, "text")
    ids = torch.tensor(tokenizer(Path(args.text).read_text(encoding="utf-8"))["input_ids"])[args.offset :]
    long, rest = ids.split([args.long_rows * args.long_length, len(ids) - args.long_rows * args.long_length])
    rows, rest = rest.split([args.rows * args.length, len(rest) - args.rows * args.length])
    passages, rest = rest.split([args.rows * args.length // 4, len(rest) - args.rows * args.length // 4])
    vocabulary = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    items = cloze_items(ids, args.long_rows, args.long_length, vocabulary, args.cloze)
    asked = chats(tokenizer, rest[-len(ASKED) * len(TOPICS) * PASSAGE :].view(-1, PASSAGE))
    starts = prompts(tokenizer, rows.view(args.rows, -1)[:4, : args.length // 2])
    measures: dict[str, Callable[[Any], Any]] = {
        "rows": lambda model: reading(model, rows.view(args.rows, -1)),
        "copying": lambda model: copying(model, passages.view(args.rows, -1)),
        **{
            f"needle at {n}": lambda model, n=n: needles(model, tokenizer, rest, n, args.needle_rows, ["harbour"])
            for n in args.needles
        },
        **{
            f"{len(NAMES)} needles at {n}": lambda model, n=n: needles(
                model, tokenizer, rest, n, (args.needle_rows + 1) // 2, NAMES
            )
            for n in args.needles
        },
        "long rows": lambda model: reading(model, long.view(args.long_rows, -1), items),
        "generations": lambda model: generations(model, tokenizer, starts),
        "answers": lambda model: answers(model, tokenizer, asked, table["softmax"].get("answers")),
    }
    if unknown := sorted(set(args.only or ()) - set(measures)):
        raise SystemExit(f"only: got {unknown[0]!r}, expected some of {', '.join(measures)}")
    output = Path(args.output)
    done: dict[str, Any] = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {"columns": {}}
    done["settings"] = {name: getattr(args, name) for name in
                        ("offset", "rows", "length", "long_rows", "long_length", "cloze", "needle_rows")}  # fmt: skip
    table, open_folder, model = done["columns"], "", None
    answered = "softmax" in args.columns or "answers" in table.get("softmax", {})
    if "answers" in (args.only or measures) and not answered:
        raise SystemExit("columns: got no softmax, whose answers the others are compared with; add softmax")
    # In this order softmax comes first.
    for name, column in ((name, column) for name, column in COLUMNS.items() if name in args.columns):
        figures = table.get(name, {})
        missing = [what for what in measures if what not in figures and what in (args.only or measures)]
        if not missing or column.folder not in {None, *args.converted}:
            continue
        table[name] = figures
        folder = args.converted[column.folder] if column.folder else args.original
        if folder != open_folder:
            model = None
            if column.folder is None:
                model = load_model(folder).model.eval()
            else:
                model = AutoModelForCausalLM.from_pretrained(folder).eval()
                original = load_model(args.original).model
                done.setdefault("same_weights", {})[column.folder] = same_weights(original, model)
                del original
            model.to(args.device)
            open_folder = folder
        with column_of(model, column) if column.folder else nullcontext():
            for what in missing:
                figures[what] = measures[what](model)
                write(output, done)
                print(name, what, str(figures[what])[:300], flush=True)
    write(output, done)


if __name__ == "__main__":
    main()
