from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch

from linearize.core.errors import DataError
from linearize.data import DataConfig, Source, load_source

Rows = Callable[[str, list[dict[str, Any]]], str]


def words(source: Source, batches: int, start: int = 0) -> list[int]:
    return [row[0].item() - 5 for b in islice(source.train_batches(start), batches) for row in b["input_ids"]]


@pytest.fixture
def path(rows: Rows) -> str:
    """Blank, then w0 to w99, then w0 to w19 once more."""
    return rows("a.jsonl", [{"text": text} for text in ["", *(f"w{n}" for n in [*range(100), *range(20)])]])


def test_the_first_rows_are_held_out_wherever_they_come(path: str, gpt_tokenizer: Any) -> None:
    config = DataConfig(dataset=path, streaming=True, holdout=10, batch_size=10)
    source = load_source(config, gpt_tokenizer, "text")
    (held,) = source.holdout_batches()
    assert held["input_ids"][:, 0].tolist() == list(range(5, 15))
    assert (source.num_train, source.num_holdout, source.skipped) == (None, 10, 1)
    assert "read while training, 10 texts held out" in source.description
    epochs = words(source, 20)
    assert Counter(epochs[:100]) == {**dict.fromkeys(range(10, 20), 2), **dict.fromkeys(range(20, 100), 1)}
    assert Counter(epochs[100:]) == Counter(epochs[:100]) and epochs[100:] != epochs[:100] != sorted(epochs[:100])


@pytest.mark.parametrize("options", [{}, {"bucketing": True}, {"packing": True, "max_length": 7}, {"limit": 30}])
def test_resuming_and_ranks(path: str, gpt_tokenizer: Any, options: dict[str, Any]) -> None:
    def load(size: int) -> Source:
        config = DataConfig(dataset=path, streaming=True, holdout=10, batch_size=size, **options)
        return load_source(config, gpt_tokenizer, "text")

    small, large = load(3), load(6)
    whole = [batch["input_ids"] for batch in islice(large.train_batches(), 60)]
    for start in (1, 49, 57):
        assert torch.equal(next(large.train_batches(start))["input_ids"], whole[start])
        parts = [next(small.train_batches(start, rank, 2))["input_ids"] for rank in (0, 1)]
        assert torch.equal(torch.cat(parts), whole[start])


def test_a_limit_is_kept(path: str, gpt_tokenizer: Any) -> None:
    config = DataConfig(dataset=path, streaming=True, holdout=10, batch_size=10, limit=30)
    assert set(words(load_source(config, gpt_tokenizer, "text"), 12)) == set(range(10, 40))


def test_a_mixture_of_streams(path: str, rows: Rows, gpt_tokenizer: Any) -> None:
    other = rows("b.jsonl", [{"text": f"w{n}"} for n in range(200, 300)])
    config = DataConfig(dataset=((path, 0.9), (other, 0.1)), streaming=True, holdout=10, batch_size=50)
    source = load_source(config, gpt_tokenizer, "text")
    drawn = words(source, 40)
    share = sum(word >= 200 for word in drawn) / 2000
    assert 0.07 < share < 0.13
    assert not {*range(9), 200} & set(drawn)
    assert words(source, 5, start=10) == drawn[500:750]


def test_labels_of_streams(rows: Rows, gpt_tokenizer: Any) -> None:
    path = rows("a.jsonl", [{"text": f"w{n}", "label": n % 2, "name": str(n % 2)} for n in range(20)])
    config = DataConfig(dataset=path, streaming=True, holdout=0, label_column="label", batch_size=20)
    batch = next(load_source(config, gpt_tokenizer, "text").train_batches())
    assert batch["labels"].tolist() == [(token - 5) % 2 for token in batch["input_ids"][:, 0].tolist()]
    config = DataConfig(dataset=path, streaming=True, text_column="text", label_column="name")
    with pytest.raises(DataError, match="got text labels in a stream"):
        load_source(config, gpt_tokenizer, "text")


def test_a_short_stream_is_refused(rows: Rows, gpt_tokenizer: Any) -> None:
    path = rows("a.jsonl", [{"text": f"w{n}"} for n in range(5)])
    with pytest.raises(DataError, match="got 5 usable examples and a holdout of 5"):
        load_source(DataConfig(dataset=path, streaming=True, holdout=5), gpt_tokenizer, "text")
    path = rows("b.jsonl", [{"text": "w1"}] * 5)
    source = load_source(DataConfig(dataset=path, streaming=True, holdout=1), gpt_tokenizer, "text")
    with pytest.raises(DataError, match="got no row to train on that is not held out"):
        next(source.train_batches())


def test_rows_are_read_as_they_are_wanted(tmp_path: Any, gpt_tokenizer: Any) -> None:
    """A stream over an endless generator must neither be read to its end nor tokenised ahead."""
    from datasets import IterableDataset

    from linearize.data.encode import TextEncoder
    from linearize.data.feeds import StreamFeed, StreamPart

    seen: list[int] = []

    def numbers() -> Any:
        for number in range(10**9):
            seen.append(number)
            yield {"text": f"w{number}"}

    table = IterableDataset.from_generator(numbers)
    feed = StreamFeed([StreamPart(table, 1.0, None, "endless")], holdout=4, limit=None, seed=0)
    items = list(islice(feed.open_at(2), 3))
    assert len(seen) < 2_000
    batch = TextEncoder(gpt_tokenizer, 4, None)(feed.fetch(items), slice(None))
    assert batch["input_ids"].shape == (3, 1) and json.dumps([row["text"] for _, row in feed.held_items()])
