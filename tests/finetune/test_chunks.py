"""Long texts as chunks: every token is in one, and outputs are averaged as worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.tasks import WORDS, word_tokenizer, write

from linearize.checkpoint.loading import load_processor
from linearize.core.errors import ConfigError
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.load import load_for_task
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.task_types.text import chunked, mean_over_chunks, pad_chunks
from linearize.training.stage_two.tasks import task
from linearize.training.stage_two.trainer import measure_with_interval

CHUNKS = DataOptions(max_length=8, chunks=True)


def text(count, seed=0):
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


@pytest.fixture
def reviews(tmp_path):
    rows = [
        {"text": text(count, count), "label": place % 2} for place, count in enumerate((1, 6, 7, 12, 13, 29, 5, 18))
    ]
    for split in ("train", "validation"):
        write(tmp_path / "reviews" / f"{split}.jsonl", rows)
    return tmp_path / "reviews"


def test_chunks_hold_every_token_once_in_order():
    tokenizer = word_tokenizer()
    texts = [text(count, count) for count in (1, 6, 7, 12, 29)]
    found = chunked(tokenizer, texts, 8)
    assert [len(chunks) for chunks in found] == [1, 1, 2, 2, 5]
    for one, chunks in zip(texts, found, strict=True):
        assert all(chunk["input_ids"][0] == 2 and chunk["input_ids"][-1] == 3 for chunk in chunks)
        inner = [token for chunk in chunks for token in chunk["input_ids"][1:-1]]
        assert inner == tokenizer(one, add_special_tokens=False)["input_ids"]
    batch = pad_chunks(tokenizer, found)
    assert batch["owners"].tolist() == [0, 1, 2, 2, 3, 3, 4, 4, 4, 4, 4] and batch["input_ids"].shape == (11, 8)
    with pytest.raises(ConfigError, match="expected more than the 2 special ones"):
        chunked(tokenizer, texts, 2)


def test_the_mean_weighs_chunks_alike_and_is_read_in_parts(monkeypatch):
    values = torch.arange(12.0).view(6, 2)
    fields = {"input_ids": torch.arange(6)[:, None].expand(6, 4)}
    owners = torch.tensor([0, 0, 0, 1, 2, 2])
    expected = torch.stack([values[:3].mean(0), values[3], values[4:].mean(0)])
    sizes = []

    def read(input_ids):
        sizes.append(len(input_ids))
        return values[input_ids[:, 0]]

    torch.testing.assert_close(mean_over_chunks(read, owners, fields), expected)
    monkeypatch.setattr("linearize.training.stage_two.task_types.text.TOKENS", 9)
    torch.testing.assert_close(mean_over_chunks(read, owners, fields), expected)
    assert sizes == [6, 2, 2, 2]


def test_classification_is_the_mean_of_logits(bert, reviews):
    tokenizer = load_processor(bert, "text")
    data = prepare(task("text-classification"), tokenizer, CHUNKS, data=str(reviews))
    assert data.facts == {"rows": 8, "max_length": 8, "longest_row": 31, "cut_share": 0.0, "chunks": 18}
    model = load_for_task(bert, data).eval()
    batch = data.collate([data.validation[place] for place in range(8)])
    with torch.no_grad():
        found = data.type.wrap(model)(**batch)["logits"]
        for place, row in enumerate(data.validation):
            by_hand = [model(input_ids=torch.tensor([chunk["input_ids"]])).logits[0] for chunk in row["chunks"]]
            torch.testing.assert_close(found[place], torch.stack(by_hand).mean(0), atol=1e-6, rtol=1e-5)
    accuracy = float(np.mean(found.argmax(-1).numpy() == batch["labels"].numpy()))
    for size in (1, 3, 8):
        measured = measure_with_interval(model, data, batch_size=size)
        assert measured.metrics["accuracy"] == accuracy and measured.units == 8


def test_similarity_is_of_mean_embeddings(bert, tmp_path):
    rows = [{"sentence1": text(n, n), "sentence2": text(20 - n, 40 + n), "label": n / 2} for n in range(1, 11)]
    for split in ("train", "validation"):
        write(tmp_path / "pairs" / f"{split}.jsonl", rows)
    tokenizer = load_processor(bert, "text")
    data = prepare(task("similarity"), tokenizer, CHUNKS, data=str(tmp_path / "pairs"))
    model = load_for_task(bert, data).eval()
    batch = data.collate([data.validation[place] for place in range(10)])
    with torch.no_grad():
        found = data.type.wrap(model)(**batch)["logits"]
        for place, row in enumerate(data.validation):
            sides = []
            for name in ("chunks", "second_chunks"):
                read = [model(input_ids=torch.tensor([one["input_ids"]])).last_hidden_state[0] for one in row[name]]
                sides.append(torch.stack([states.mean(0) for states in read]).mean(0))
            torch.testing.assert_close(found[place], torch.cosine_similarity(*sides, dim=0), atol=1e-6, rtol=1e-5)
    # One chunk that holds a whole text is the text.
    short = prepare(
        task("similarity"), tokenizer, DataOptions(max_length=32, chunks=True), data=str(tmp_path / "pairs")
    )
    plain = prepare(task("similarity"), tokenizer, DataOptions(max_length=32), data=str(tmp_path / "pairs"))
    scores = [measure_with_interval(model, data).score for data in (short, plain)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6) and plain.facts["longest_row"] == 21


def test_a_regression_is_the_mean_of_numbers(bert, tmp_path):
    rows = [{"text": text(n, n), "label": n / 3} for n in range(1, 20)]
    for split in ("train", "validation"):
        write(tmp_path / "numbers" / f"{split}.jsonl", rows)
    data = prepare(task("text-regression"), load_processor(bert, "text"), CHUNKS, data=str(tmp_path / "numbers"))
    model = load_for_task(bert, data).eval()
    row = data.validation[18]
    with torch.no_grad():
        found = data.type.wrap(model)(**data.collate([row]))["logits"]
        by_hand = [float(model(input_ids=torch.tensor([chunk["input_ids"]])).logits) for chunk in row["chunks"]]
    assert len(by_hand) == 4 and found.shape == (1, 1) and float(found) == pytest.approx(np.mean(by_hand), abs=1e-6)


def test_pairs_are_not_read_as_chunks(bert, glue):
    tokenizer = load_processor(bert, "text")
    assert not prepare(task("mrpc"), tokenizer, DataOptions(max_length=16), data=str(glue)).chunkable
    assert prepare(task("cola"), tokenizer, DataOptions(max_length=16), data=str(glue)).chunkable
    with pytest.raises(ConfigError, match="task mrpc reads pairs of texts"):
        prepare(task("mrpc"), tokenizer, CHUNKS, data=str(glue))
