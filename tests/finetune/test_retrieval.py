"""Halves of texts that look for each other: ranks, chunks, chance, intervals, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from finetune.conftest import write
from support.checkpoints import WORDS
from support.tasks import no_rows
from transformers import AutoModel, AutoTokenizer

from linearize.cli import main
from linearize.core.errors import ConfigError, DataError
from linearize.jobs.synthetic.sets import make
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.metrics import part_ranks, ranks, retrieval
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.tasks import task
from linearize.training.stage_two.trainer import finetune, measure_with_interval


def text(number: int, words: int) -> str:
    """Draw words: halves that repeat each other's would be as near but for rounding."""
    return " ".join(np.random.default_rng(number).choice(WORDS, words))


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "validation"):
        write(tmp_path / "texts" / f"{split}.jsonl", [{"text": text(n, 9 + n)} for n in range(12)])
    return str(tmp_path / "texts")


def test_ranks_count_those_that_are_as_near_or_nearer(monkeypatch):
    random = np.random.default_rng(0)
    queries, texts = random.normal(size=(2, 7, 5))
    expected = []
    for n, query in enumerate(queries):
        cosines = [query @ one / np.linalg.norm(query) / np.linalg.norm(one) for one in texts]
        expected.append(1 + sum(c >= cosines[n] for m, c in enumerate(cosines) if m != n))
    assert list(ranks(queries, texts)) == expected
    assert len(set(expected)) > 1
    # The length of an embedding is no matter, and neither are the blocks; the same text twice is not found.
    monkeypatch.setattr("linearize.training.stage_two.metrics.BLOCK", 3)
    assert list(ranks(3 * queries, texts / 7)) == expected
    assert list(ranks(np.eye(3)[[0, 1, 1]], np.eye(3)[[0, 1, 1]])) == [1, 2, 2]
    found = retrieval(np.array([1, 4, 20, 10]))
    assert found == {"recall_at_1": 0.25, "recall_at_10": 0.75, "mrr": pytest.approx((1 + 1 / 4 + 1 / 20 + 1 / 10) / 4)}
    (chance,) = no_rows("retrieval").type.chance_metrics(np.arange(20))
    assert chance["recall_at_1"] == 1 / 20 and chance["recall_at_10"] == 1 / 2


@pytest.mark.parametrize("options", [DataOptions(max_length=64), DataOptions(max_length=6, chunks=True)])
def test_the_first_half_of_a_text_looks_for_its_second(loud_bert, folder, options):
    tokenizer, model = AutoTokenizer.from_pretrained(loud_bert), AutoModel.from_pretrained(loud_bert).eval()
    data = prepare(task("retrieval"), tokenizer, options, data=folder)
    sides: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        for number in range(12):
            words = text(number, 9 + number).split()
            middle = len(words) // 2
            for side, half in zip(sides, (words[:middle], words[middle:]), strict=True):
                ids = tokenizer(" ".join(half), add_special_tokens=False)["input_ids"]
                size = options.max_length - 2
                pieces = [
                    [tokenizer.cls_token_id, *ids[b : b + size], tokenizer.sep_token_id]
                    for b in range(0, len(ids), size)
                ]
                read = [model(input_ids=torch.tensor([piece])).last_hidden_state[0].mean(dim=0) for piece in pieces]
                side.append(torch.stack(read).mean(dim=0))
    expected = ranks(*(torch.stack(side).numpy() for side in sides))
    measured = measure_with_interval(model, data, batch_size=5)
    assert measured.score == measured.metrics["recall_at_1"] == (expected == 1).mean()
    assert measured.metrics["mrr"] == pytest.approx((1 / expected).mean())
    assert measured.rows == measured.units == 12 and measured.chance == 1 / 12
    low, high = measured.interval
    assert 0 <= low <= measured.score <= high <= 1
    assert data.facts["rows"] == 12 and data.facts["cut_share"] == 0 and data.facts["longest_row"] == 12


def test_there_is_nothing_to_tune(bert, folder, tmp_path):
    data = prepare(task("retrieval"), AutoTokenizer.from_pretrained(bert), data=folder)
    with pytest.raises(ConfigError, match="nothing to train"):
        finetune(AutoModel.from_pretrained(bert), data, TuneConfig(steps=1), folder=tmp_path)


def test_from_the_command_line_at_each_length(bert, folder, capsys):
    line = ["evaluate", bert, "--task", "retrieval", "--dataset", folder, "--compare", bert, "--device", "cpu"]
    assert main([*line, "--max-length", "16", "--chunk-length", "6"]) == 0
    shown = capsys.readouterr().out
    # Headings of several words are broken between them.
    assert {"recall", "1", "10", "mrr", "chance"} <= set(shown.replace("┃", " ").split())
    assert "the original, chunks" in shown


def test_what_cannot_be_cut_in_two(bert, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(bert)
    rows = {"train": [{"text": text(n, 8)} for n in range(30)], "validation": [{"text": text(n, 9)} for n in range(4)]}
    for short in rows:
        for name in rows:
            write(tmp_path / short / f"{name}.jsonl", rows[name] + [{"text": WORDS[0]}] * (name == short))
    with pytest.raises(DataError, match=r"got a text of one word .number 4 of 5"):
        prepare(task("retrieval"), tokenizer, data=str(tmp_path / "validation"))
    # To measure, rows to train on are not read.
    measured = prepare(task("retrieval"), tokenizer, DataOptions(trains=False), data=str(tmp_path / "train"))
    assert len(measured.validation) == 4 and not measured.train
    with pytest.raises(DataError, match=r"got a text of one word .number 30 of 31"):
        prepare(task("retrieval"), tokenizer, data=str(tmp_path / "train"))
    for name, rows in (("train", 3), ("validation", 1)):
        write(tmp_path / "one" / f"{name}.jsonl", [{"text": text(n, 8)} for n in range(rows)])
    with pytest.raises(DataError, match="got 1 text to measure on"):
        prepare(task("retrieval"), tokenizer, data=str(tmp_path / "one"))
    with pytest.raises(ConfigError, match="its rows have no labels"):
        task("retrieval", label="label")


def test_articles_are_put_together_of_lines(tmp_path):
    lines = ["\n", " = One = \n", " \n", " a b \n", " = = Part = = \n", " c @-@ d \n", " = Two = \n", " e \n"]
    (tmp_path / "corpus").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "corpus" / f"{split}.txt").write_text("".join(lines), encoding="utf-8")
    made, _ = make("articles", {"shortest": 2}, str(tmp_path / "corpus"))
    assert [row["text"] for row in made["validation"]] == ["a b = = Part = = c @-@ d"] and len(made["train"]) == 1
    halves, _ = make("articles", {"shortest": 2, "held": 0.5}, str(tmp_path / "corpus"))
    assert [len(table) for table in halves.values()] == [1, 1]
    with pytest.raises(DataError, match=r"too few to hold out a share of 0\.1"):
        make("articles", {"shortest": 2, "held": 0.1}, str(tmp_path / "corpus"))
    with pytest.raises(DataError, match="got 2 articles, expected some of at least 300 words"):
        make("articles", {"shortest": 300}, str(tmp_path / "corpus"))
    (tmp_path / "corpus" / "train.txt").write_text("a\nb\n", encoding="utf-8")
    with pytest.raises(DataError, match="without a heading"):
        make("articles", {}, str(tmp_path / "corpus"))


def test_articles_that_open_alike(tmp_path):
    (tmp_path / "corpus").mkdir()
    for split in ("train", "validation"):
        lines = [f"= {split} {n} =\n" + " ".join(f"{split}{n}w{m}" for m in range(6 + n)) for n in range(4)]
        (tmp_path / "corpus" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    plain, _ = make("articles", {"shortest": 2}, str(tmp_path / "corpus"))
    made, _ = make("articles", {"shortest": 2, "opening": 5}, str(tmp_path / "corpus"))
    opening = [f"train0w{m}" for m in range(5)]
    for split, skipped in (("train", 1), ("validation", 0)):
        before = plain[split]["text"][skipped:]
        for text, old in zip(made[split]["text"], before, strict=True):
            words = text.split()
            halves = words[: len(words) // 2], words[len(words) // 2 :]
            assert all(half[:5] == opening for half in halves)
            assert [*halves[0][5:], *halves[1][5:]] == old.split()
    with pytest.raises(DataError, match="the first of 6 words, expected another article and an opening of 7 words"):
        make("articles", {"shortest": 2, "opening": 7}, str(tmp_path / "corpus"))
    with pytest.raises(ConfigError, match="articles, opening: got -1, expected a whole number of at least 0"):
        make("articles", {"opening": -1}, str(tmp_path / "corpus"))


def test_needles_lie_at_their_depths(tmp_path):
    (tmp_path / "corpus").mkdir()
    for split in ("train", "validation"):
        lines = [f"= {split} {n} =\n" + " ".join(f"{split}{n}w{m}" for m in range(200)) for n in range(8)]
        (tmp_path / "corpus" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    for passkey in (False, True):
        made, _ = make("needles", {"words": 80, "documents": 20, "passkey": passkey}, str(tmp_path / "corpus"))
        rows = list(made["validation"])
        assert sorted(row["depth"] for row in rows) == sorted([*range(10)] * 2)
        hay = [word for row in rows for word in row["text"].split() if word.startswith("validation")]
        assert len(hay) == len(set(hay))
        for row in rows:
            words = row["text"].split()
            fact = [place for place, word in enumerate(words) if not word.startswith("validation")]
            assert len(words) == 80 and fact == list(range(fact[0], fact[-1] + 1))
            assert fact[0] == round((row["depth"] + 0.5) / 10 * (80 - len(fact)))
            # The question's name or place is in no other document.
            (key,) = {word.strip("?.") for word in row["question"].split()} & {
                word.strip("?.")
                for word in words
                if word.strip("?.").endswith(("wick", "mere", "holm", "stead", "ford"))
            } or [row["question"].removeprefix("What is the passkey of ").rstrip("?")]
            assert [key in other["text"] for other in rows].count(True) == 1 and key in row["text"]
    with pytest.raises(DataError, match="needles: got 1600 words, expected enough for two documents"):
        make("needles", {"words": 900}, str(tmp_path / "corpus"))


def test_the_best_part_of_a_text_counts():
    nothing = [np.nan, np.nan]
    queries = np.array([[[1, 0], nothing], [[0, 1], nothing], [[1, 1], nothing]])
    # The second text's mean is nearest to the first query, but the first text has a part that is its twin.
    texts = np.array([[[1, 0], [-1, 0.1]], [[0.9, 0.2], [0, 0.9]], [[-1, -1], [0.2, -1]]])
    assert list(part_ranks(queries, texts)) == [1, 1, 3]
    assert retrieval(np.array([1, 2]), np.array([1, 1]))["best_recall_at_1"] == 1.0
    # A text that is read whole is compared by its spans, in chunks by its chunks.


@pytest.mark.parametrize("chunks", [True, False])
def test_questions_look_for_texts_whole_and_by_parts(bert, tmp_path, monkeypatch, chunks):
    monkeypatch.setattr("linearize.training.stage_two.task_types.embeddings.SPAN", 6)
    tokenizer, model = AutoTokenizer.from_pretrained(bert), AutoModel.from_pretrained(bert).eval()
    pairs = [{"question": text(n, 3), "text": text(n, 8 + n)} for n in range(7)]
    for split in ("train", "validation"):
        write(tmp_path / "pairs" / f"{split}.jsonl", pairs)
    options = DataOptions(max_length=6 if chunks else 32, chunks=chunks)
    data = prepare(task("retrieval", columns=("question", "text")), tokenizer, options, data=str(tmp_path / "pairs"))

    def read(ids):
        return model(input_ids=torch.tensor([ids])).last_hidden_state[0]

    sides: list[list[list[torch.Tensor]]] = [[], []]
    with torch.no_grad():
        for pair in pairs:
            for side, one in zip(sides, pair.values(), strict=True):
                ids = tokenizer(one, add_special_tokens=False)["input_ids"]
                cut = [ids[begin : begin + 4] for begin in range(0, len(ids), 4)]
                pieces = [read([tokenizer.cls_token_id, *piece, tokenizer.sep_token_id]) for piece in cut]
                whole = read(tokenizer(one)["input_ids"])
                parts = [p.mean(dim=0) for p in (pieces if chunks else whole.split(6))]
                side.append([torch.stack(parts).mean(dim=0) if chunks else whole.mean(dim=0), *parts])
    expected = []
    for query in sides[0]:
        near = [
            max(float(torch.cosine_similarity(a, b, dim=0)) for a in query[1:] for b in one[1:]) for one in sides[1]
        ]
        expected.append(near)
    best = [1 + sum(x >= near[n] for m, x in enumerate(near) if m != n) for n, near in enumerate(expected)]
    scored, metrics = [], data.type.metrics
    monkeypatch.setattr(data.type, "metrics", lambda *units: scored.append(units) or metrics(*units))
    measured = measure_with_interval(model, data, batch_size=3)
    whole_ranks = ranks(*(np.stack([one[0].numpy() for one in side]) for side in sides))
    assert list(scored[0][0]) == list(whole_ranks) and list(scored[0][1]) == best
    assert measured.metrics["best_mrr"] == pytest.approx(np.mean(1 / np.array(best)))
