from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from linearize.core.errors import DataError
from linearize.data import DataConfig, Source, load_source
from linearize.data.hub import first_rows
from linearize.data.load import open_records

Rows = Callable[[str, list[dict[str, Any]]], str]


def words(source: Source, batches: int) -> list[int]:
    return [row[0].item() - 5 for b in islice(source.train_batches(), batches) for row in b["input_ids"]]


@pytest.fixture
def path(rows: Rows) -> str:
    """Blank, then w0 to w99, then w0 to w19 once more."""
    return rows("a.jsonl", [{"text": text} for text in ["", *(f"w{n}" for n in [*range(100), *range(20)])]])


def test_a_stream_is_its_first_rows(path: str, gpt_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linearize.data.config.STREAMED", 40)
    config = DataConfig(dataset=path, streaming=True, holdout=10, batch_size=10)
    source = load_source(config, gpt_tokenizer, "text")
    (held,) = source.holdout_batches()
    held_words = set((held["input_ids"][:, 0] - 5).tolist())
    assert (source.num_train, source.num_holdout, source.skipped) == (29, 10, 1)
    # The first 40 rows, of which one is blank.
    trained = words(source, 9)
    assert set(trained) | held_words == set(range(39)) and not set(trained) & held_words


def test_all_rows_of_a_set_below_the_default(path: str, gpt_tokenizer: Any) -> None:
    whole = load_source(DataConfig(dataset=path, holdout=10), gpt_tokenizer, "text")
    streamed = load_source(DataConfig(dataset=path, holdout=10, streaming=True), gpt_tokenizer, "text")
    assert whole.digest() == streamed.digest() and whole.num_train == streamed.num_train
    assert words(whole, 8) == words(streamed, 8)


def test_a_mixture_of_streams(path: str, rows: Rows, gpt_tokenizer: Any) -> None:
    other = rows("b.jsonl", [{"text": f"w{n}"} for n in range(200, 300)])
    config = DataConfig(dataset=((path, 0.9), (other, 0.1)), streaming=True, holdout=10, batch_size=50)
    drawn = words(load_source(config, gpt_tokenizer, "text"), 40)
    share = sum(word >= 200 for word in drawn) / 2000
    assert 0.07 < share < 0.13


def test_labels_of_streams(rows: Rows) -> None:
    path = rows("a.jsonl", [{"text": f"w{n}", "label": n % 2, "name": str(n % 2)} for n in range(20)])
    for column, expected in (("label", None), ("name", ("0", "1"))):
        records, _ = open_records(path, DataConfig(streaming=True, text_column="text"), "text", label=column)
        assert records.names == expected
        for example in records.fetch(range(20)):
            assert int(example.label or 0) == int(example.value[1:]) % 2


def test_a_short_stream_is_refused(rows: Rows, gpt_tokenizer: Any) -> None:
    path = rows("a.jsonl", [{"text": f"w{n}"} for n in range(5)])
    with pytest.raises(DataError, match="got 5 usable examples and a holdout of 5"):
        load_source(DataConfig(dataset=path, streaming=True, holdout=5), gpt_tokenizer, "text")


def test_an_endless_stream_is_not_read_further() -> None:
    from datasets import IterableDataset

    seen: list[int] = []

    def numbers() -> Any:
        for number in range(10**9):
            seen.append(number)
            yield {"text": f"w{number}"}

    table = first_rows(IterableDataset.from_generator(numbers), 7)
    assert table["text"][:] == [f"w{number}" for number in range(7)] and len(seen) < 20
