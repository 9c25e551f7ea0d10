from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from linearize.core.errors import ConfigError, DataError
from linearize.data import DataConfig, load_source
from linearize.data.load import open_records

Rows = Callable[[str, list[dict[str, Any]]], str]


def numbered(first: int, last: int, words: int = 1) -> list[dict[str, Any]]:
    return [{"text": " ".join([f"w{number}"] * (1 + number % words))} for number in range(first, last)]


def take(batches: Iterator[dict[str, torch.Tensor]], number: int) -> list[dict[str, torch.Tensor]]:
    return list(islice(batches, number))


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def words_of(batches: list[dict[str, torch.Tensor]], column: int) -> list[int]:
    return [token for batch in batches for token in batch["input_ids"][:, column].tolist()]


def test_batches_are_padded_on_the_tokenizers_side(rows: Rows, bert_tokenizer: Any) -> None:
    path = rows("a.jsonl", [{"text": "w1 w2 w3"}, {"text": "w4"}])
    config = DataConfig(dataset=path, batch_size=2, holdout=0, seed=0)
    batch = next(load_source(config, bert_tokenizer, "text").train_batches())
    by_length = {int(mask.sum()): row for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)}
    assert by_length[5].tolist() == [2, 6, 7, 8, 3]
    assert by_length[3].tolist() == [2, 9, 3, 0, 0]
    assert batch["token_type_ids"].tolist() == [[0] * 5] * 2
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    left = type(bert_tokenizer)(tokenizer_object=bert_tokenizer.backend_tokenizer, pad_token="[PAD]")
    left.padding_side = "left"
    batch = next(load_source(config, left, "text").train_batches())
    assert sorted(batch["input_ids"].tolist()) == [[0, 0, 2, 9, 3], [2, 6, 7, 8, 3]]


@pytest.mark.parametrize(("column", "special"), [("a", 2), ("a,b", 3)])
def test_a_row_has_room_for_its_special_tokens(rows: Rows, bert_tokenizer: Any, column: str, special: int) -> None:
    """The tokenizer then cut nothing, and rows had any length."""
    path = rows("a.jsonl", [{"a": "w1 w2 w3", "b": "w4"}] * 2)
    config = DataConfig(dataset=path, text_column=column, max_length=special - 1, holdout=0)
    with pytest.raises(ConfigError, match=f"got {special - 1}, expected at least the {special} special tokens"):
        next(load_source(config, bert_tokenizer, "text").train_batches())


def test_long_texts_are_cut_and_pairs_are_told_apart(rows: Rows, bert_tokenizer: Any) -> None:
    path = rows("a.jsonl", [{"a": "w1 " * 50, "b": "w2 w3"}] * 2)
    config = DataConfig(dataset=path, text_column="a", text_pair_column="b", max_length=8, batch_size=1, holdout=0)
    batch = next(load_source(config, bert_tokenizer, "text").train_batches())
    assert batch["input_ids"].tolist() == [[2, 6, 6, 6, 3, 7, 8, 3]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]


@pytest.mark.parametrize("streaming", [False, True])
def test_two_columns_are_a_pair(rows: Rows, bert_tokenizer: Any, streaming: bool) -> None:
    """Under usual names by themselves, else as A,B; one name alone means that text alone."""
    path = rows("a.jsonl", [{"label": 1, "sentence2": "w2 w3", "sentence1": "w1"}] * 4)
    pair = [[2, 6, 3, 7, 8, 3], [0, 0, 0, 1, 1, 1]]
    for column, expected in ((None, pair), ("sentence1,sentence2", pair), ("sentence1", [[2, 6, 3], [0, 0, 0]])):
        config = DataConfig(dataset=path, text_column=column, batch_size=1, holdout=0, streaming=streaming)
        source = load_source(config, bert_tokenizer, "text")
        batch = next(source.train_batches())
        assert [batch["input_ids"][0].tolist(), batch["token_type_ids"][0].tolist()] == expected
        assert ("(pairs of sentence1 and sentence2)" in source.description) is (column is None)
    swapped = DataConfig(dataset=path, text_column="sentence2, sentence1", batch_size=1, holdout=0)
    batch = next(load_source(swapped, bert_tokenizer, "text").train_batches())
    assert batch["input_ids"][0].tolist() == [2, 7, 8, 3, 6, 3]


@pytest.mark.parametrize("columns", [{}, {"text_column": "tokens"}, {"text_column": "id,tokens"}])
def test_lists_of_words_are_joined(rows: Rows, bert_tokenizer: Any, columns: dict[str, str]) -> None:
    """As in data sets of entities, whose number is the only column of texts."""
    row = {"id": "w9", "tokens": ["w1", None, "w2"], "ner_tags": ["O", "O", "O"]}
    config = DataConfig(dataset=rows("a.jsonl", [row] * 4), batch_size=1, holdout=0, **columns)
    batch = next(load_source(config, bert_tokenizer, "text").train_batches())
    assert batch["input_ids"][0].tolist() == ([2, 14, 3, 6, 7, 3] if "," in str(columns) else [2, 6, 7, 3])


def test_packing_and_a_usual_text_column_leave_pairs_alone(rows: Rows, bert_tokenizer: Any) -> None:
    row = {"text": "w5", "sentence1": "w1", "sentence2": "w2"}
    batch = next(
        load_source(DataConfig(dataset=rows("a.jsonl", [row] * 2), holdout=0), bert_tokenizer, "text").train_batches()
    )
    assert batch["input_ids"][0].tolist() == [2, 10, 3]
    with pytest.raises(DataError, match=r"set text_column .of a task: columns. to one of its columns"):
        load_source(
            DataConfig(dataset=rows("b.jsonl", [{"sentence1": "a", "sentence2": "b"}]), packing=True),
            bert_tokenizer,
            "text",
        )


def test_a_mixture_of_texts_and_pairs(rows: Rows, bert_tokenizer: Any) -> None:
    mixture = {
        rows("a.jsonl", [{"text": "w1"}] * 8): 1.0,
        rows("b.jsonl", [{"question": "w2", "sentence": "w3"}] * 8): 1.0,
    }
    config = DataConfig(dataset=tuple(mixture.items()), batch_size=8, holdout=0)
    batch = next(load_source(config, bert_tokenizer, "text").train_batches())
    found = sorted(
        ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    )
    assert found == [[2, 6, 3]] * 4 + [[2, 7, 3, 8, 3]] * 4


def test_a_tokenizer_without_padding_pads_with_its_end_and_stays_as_it_was(rows: Rows, gpt_tokenizer: Any) -> None:
    path = rows("a.jsonl", [{"text": "w1 w2"}, {"text": "w3"}])
    batch = next(load_source(DataConfig(dataset=path, batch_size=2, holdout=0), gpt_tokenizer, "text").train_batches())
    assert sorted(batch["input_ids"].tolist()) == [[6, 7], [8, 4]]
    assert int(batch["attention_mask"].sum()) == 3
    assert "token_type_ids" not in batch
    assert gpt_tokenizer.pad_token is None and gpt_tokenizer.model_max_length != 10**9


def test_held_out_texts_and_their_doubles_are_never_trained_on(rows: Rows, gpt_tokenizer: Any) -> None:
    items = numbered(0, 100) + [{"text": f" w{number} "} for number in range(100)] + numbered(0, 50)
    config = DataConfig(dataset=rows("a.jsonl", items), batch_size=10, holdout=40, seed=5)
    source = load_source(config, gpt_tokenizer, "text")
    assert (source.num_holdout, source.num_train) == (40, 250 - 40 - source.duplicates)
    assert source.duplicates > 40
    held = words_of(source.holdout_batches(), 0)
    trained = words_of(take(source.train_batches(), 2 * 250 // 10), 0)
    assert len(held) == 40 and not set(held) & set(trained)
    assert set(held) | set(trained) == set(range(5, 105))
    again = load_source(config, gpt_tokenizer, "text")
    assert words_of(again.holdout_batches(), 0) == held
    other = load_source(DataConfig(dataset=config.dataset, holdout=40, seed=6), gpt_tokenizer, "text")
    assert words_of(other.holdout_batches(), 0) != held


@pytest.mark.parametrize("options", [{}, {"packing": True, "max_length": 6}])
def test_resuming_gives_what_would_have_come(rows: Rows, gpt_tokenizer: Any, options: dict[str, Any]) -> None:
    path = rows("a.jsonl", numbered(0, 300, words=9))
    source = load_source(DataConfig(dataset=path, batch_size=8, holdout=10, **options), gpt_tokenizer, "text")
    whole = take(source.train_batches(), 130)
    for start in (0, 1, 36, 37, 99, 128):
        resumed = take(source.train_batches(start), 2)
        assert all(same(one, other) for one, other in zip(resumed, whole[start : start + 2], strict=True))
    assert not same(whole[0], whole[1])


def test_resuming_tokenises_no_skipped_text(rows: Rows, gpt_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rows("a.jsonl", numbered(0, 300))
    source = load_source(DataConfig(dataset=path, batch_size=4), gpt_tokenizer, "text")
    fetched: list[int] = []
    original = source._train.fetch
    monkeypatch.setattr(source._train, "fetch", lambda items: (fetched.extend(items), original(items))[1])
    next(source.train_batches(start=10_000_003))
    assert len(fetched) == 4


@pytest.mark.parametrize("options", [{}, {"packing": True, "max_length": 6}])
def test_ranks_share_the_global_batch(rows: Rows, bert_tokenizer: Any, options: dict[str, Any]) -> None:
    path = rows("a.jsonl", numbered(0, 200, words=9))
    small = load_source(DataConfig(dataset=path, batch_size=4, **options), bert_tokenizer, "text")
    large = load_source(DataConfig(dataset=path, batch_size=12, **options), bert_tokenizer, "text")
    ranks = [take(small.train_batches(5, rank, 3), 30) for rank in range(3)]
    for whole, *parts in zip(take(large.train_batches(5), 30), *ranks, strict=True):
        joined = {name: torch.cat([part[name] for part in parts]) for name in whole}
        assert same(joined, whole)


def test_packing_fills_every_row_and_keeps_the_order(rows: Rows, gpt_tokenizer: Any, bert_tokenizer: Any) -> None:
    path = rows("a.jsonl", [{"text": "w1 w2"}, {"text": ""}, {"text": "w3 w4 w5"}, {"text": "w6"}])
    config = DataConfig(dataset=path, packing=True, max_length=3, batch_size=3, holdout=0)
    source = load_source(config, gpt_tokenizer, "text")
    batch = next(source.train_batches())
    assert (source.num_train, source.skipped) == (3, 1)
    assert sorted(batch["input_ids"].tolist()) == [[4, 11, 4], [6, 7, 4], [8, 9, 10]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1]] * 3
    batch = next(load_source(config, bert_tokenizer, "text").train_batches())
    assert {tuple(row) for row in batch["input_ids"].tolist()} <= {(2, 6, 7), (3, 2, 8), (9, 10, 3), (2, 11, 3)}


def test_packed_held_out_rows_keep_the_rest(rows: Rows, gpt_tokenizer: Any) -> None:
    path = rows("a.jsonl", numbered(0, 20))
    config = DataConfig(dataset=path, packing=True, max_length=8, holdout=5, batch_size=4)
    source = load_source(config, gpt_tokenizer, "text")
    (batch,) = source.holdout_batches()
    assert batch["attention_mask"].tolist() == [[1] * 8, [1, 1, 0, 0, 0, 0, 0, 0]]
    assert (source.num_holdout, source.num_train) == (2, 3)
    assert "3 rows of 8 tokens to train on, 2 held out" in source.description
    short = DataConfig(dataset=path, packing=True, max_length=64, holdout=5, batch_size=1)
    source = load_source(short, gpt_tokenizer, "text")
    assert next(source.train_batches())["input_ids"].shape == (1, 30)
    # It was recorded as the 64 tokens of a full row.
    assert source.row_length == 30 and "1 rows of 30 tokens to train on" in source.description


def test_a_mixture_keeps_its_weights_and_shares_the_holdout(rows: Rows, gpt_tokenizer: Any) -> None:
    first, second = rows("a.jsonl", numbered(0, 40)), rows("b.jsonl", numbered(20, 200))
    config = DataConfig(dataset=((first, 0.8), (second, 0.2)), batch_size=10, holdout=10)
    source = load_source(config, gpt_tokenizer, "text")
    held = words_of(source.holdout_batches(), 0)
    trained = words_of(take(source.train_batches(), 100), 0)
    assert sum(token < 45 for token in held) >= 8 and not set(held) & set(trained)
    only_second = sum(token >= 45 for token in trained)
    assert 0.13 < only_second / 1000 < 0.2
    assert source.description.startswith("mixture of 80% file ")


def test_a_small_part_of_a_mixture_is_not_all_held_out(rows: Rows, gpt_tokenizer: Any) -> None:
    first, second = rows("a.jsonl", numbered(0, 50)), rows("b.jsonl", numbered(50, 53))
    source = load_source(DataConfig(dataset=((first, 0.5), (second, 0.5))), gpt_tokenizer, "text")
    held = words_of(source.holdout_batches(), 0)
    assert (source.num_train, len(held), sum(token >= 55 for token in held)) == (40, 13, 2)
    one = rows("c.jsonl", numbered(60, 61))
    with pytest.raises(DataError, match="got 2 usable examples and a holdout of 1, expected at least 3 examples"):
        load_source(DataConfig(dataset=((one, 1.0), (rows("d.jsonl", numbered(61, 62)), 1.0))), gpt_tokenizer, "text")


def test_the_column_of_the_label_is_not_the_text(rows: Rows) -> None:
    records, _ = open_records(rows("a.jsonl", [{"intent": "a", "odd": "w1"}]), DataConfig(), "text", label="intent")
    assert records.fetch([0]) == [("w1", None, "a")]
    path = rows("b.jsonl", [{"intent": "a", "n": 1}])
    with pytest.raises(DataError, match="got 0 columns that may be the text"):
        open_records(path, DataConfig(), "text", label="intent")


def test_labels_go_along(rows: Rows) -> None:
    items = [{"text": f"w{n}", "kind": ["no", "yes", None][n % 3], "score": n / 2, "number": n} for n in range(30)]
    path = rows("a.jsonl", items)
    kinds, _ = open_records(path, DataConfig(), "text", label="kind")
    assert (kinds.names, len(kinds.sizes), kinds.skipped) == (("no", "yes"), 20, 10)
    for column in ("kind", "score", "number"):
        records, _ = open_records(path, DataConfig(), "text", label=column)
        for example in records.fetch(range(len(records.sizes))):
            assert example.label == items[int(example.value[1:])][column]
    assert records.names is None


def test_a_text_without_tokens_still_has_a_row(rows: Rows) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("-", "removed")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    path = rows("a.jsonl", [{"text": "---"}, {"text": "-"}])
    batch = next(load_source(DataConfig(dataset=path, batch_size=2, holdout=0), wrapped, "text").train_batches())
    assert batch["input_ids"].tolist() == [[0], [0]] and batch["attention_mask"].tolist() == [[1], [1]]


@pytest.mark.parametrize(("count", "held"), [(2, 1), (10, 2), (96, 24), (256, 64), (400, 64)])
def test_little_data_is_not_mostly_held_out(rows: Rows, gpt_tokenizer: Any, count: int, held: int) -> None:
    source = load_source(DataConfig(dataset=rows("a.jsonl", numbered(0, count))), gpt_tokenizer, "text")
    assert (source.num_train, source.num_holdout) == (count - held, held)


def test_too_little_data_is_refused(rows: Rows, gpt_tokenizer: Any) -> None:
    path = rows("a.jsonl", numbered(0, 10))
    with pytest.raises(DataError, match="got 10 usable examples and a holdout of 64"):
        load_source(DataConfig(dataset=path, holdout=64), gpt_tokenizer, "text")
    with pytest.raises(DataError, match="got 1 usable examples and a holdout of 1"):
        load_source(DataConfig(dataset=rows("one.jsonl", numbered(0, 1))), gpt_tokenizer, "text")
    double = rows("b.jsonl", [{"text": "w1"}] * 10)
    with pytest.raises(DataError, match="to train on that is not held out"):
        load_source(DataConfig(dataset=double, holdout=1), gpt_tokenizer, "text")


def test_what_does_not_fit_the_model_is_refused(rows: Rows, gpt_tokenizer: Any, image_processor: Any) -> None:
    path = rows("a.jsonl", numbered(0, 9))
    with pytest.raises(ConfigError, match="expected a tokenizer"):
        load_source(DataConfig(dataset=path), image_processor, "text")
    with pytest.raises(ConfigError, match="unknown modality 'txt'"):
        load_source(DataConfig(dataset=path), gpt_tokenizer, "txt")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="image_column for a model that reads text"):
        load_source(DataConfig(dataset=path, image_column="text"), gpt_tokenizer, "text")
    bare = type(gpt_tokenizer)(tokenizer_object=gpt_tokenizer.backend_tokenizer)
    with pytest.raises(ConfigError, match="with neither a padding nor an end token"):
        load_source(DataConfig(dataset=path), bare, "text")
