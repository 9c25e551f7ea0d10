from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from linearize.core.errors import DataError
from linearize.data import DataConfig, load_source
from linearize.data.load import open_records

Write = Callable[[str, str], str]
TEXTS = [f"w{number}" for number in range(6)]
JSON_LINES = "".join(json.dumps({"text": text, "label": 1}) + "\n" for text in TEXTS)
CSV = "text,label\n" + "".join(f"{text},1\n" for text in TEXTS)
CONTENT = {
    "jsonl": JSON_LINES,
    "json": json.dumps([{"text": text} for text in TEXTS]),
    "csv": CSV,
    "tsv": CSV.replace(",", "\t"),
    "txt": "\n".join(TEXTS) + "\n",
}


def trained_words(path: str, tokenizer: Any, **options: Any) -> list[int]:
    """Numbers of the words of one epoch."""
    source = load_source(DataConfig(dataset=path, holdout=0, batch_size=1, **options), tokenizer, "text")
    number = source.num_train or 6
    return sorted(batch["input_ids"][0, 0].item() - 5 for batch in islice(source.train_batches(), number))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv", "txt", "jsonl.gz", "json.gz", "csv.gz", "txt.gz"])
def test_every_kind_of_file(write: Write, gpt_tokenizer: Any, ending: str, streaming: bool) -> None:
    path = write(f"some, data.{ending}", CONTENT[ending.removesuffix(".gz")])
    assert trained_words(path, gpt_tokenizer, streaming=streaming) == [0, 1, 2, 3, 4, 5]


def test_the_mark_before_a_text_of_windows_is_no_text(write: Write) -> None:
    records, _ = open_records(write("a.txt", "\ufeffw1\r\nw2\r\n"), DataConfig(), "text")
    assert [example.value for example in records.fetch([0, 1])] == ["w1", "w2"]


def test_parquet(tmp_path: Path, gpt_tokenizer: Any) -> None:
    from datasets import Dataset

    path = tmp_path / "a.parquet"
    Dataset.from_dict({"text": TEXTS}).to_parquet(path)
    assert trained_words(str(path), gpt_tokenizer) == [0, 1, 2, 3, 4, 5]
    assert trained_words(str(path), gpt_tokenizer, streaming=True) == [0, 1, 2, 3, 4, 5]


def test_tables_keep_their_texts_as_they_are(write: Write, gpt_tokenizer: Any) -> None:
    lone_quote = write("a.tsv", 'text\tlabel\nw1 "w2\t1\nw3\t0\n')
    assert trained_words(lone_quote, gpt_tokenizer) == [1, 3]
    words = write("a.csv", 'text,label\nNA,1\nnull,0\n"w3, w4",1\n,1\n')
    records, _ = open_records(words, DataConfig(), "text", label="label")
    assert (len(records.sizes), records.skipped, records.names) == (3, 1, None)
    assert trained_words(write("b.csv", "text,__index_level_0__\nw1,7\nw2,8\n"), gpt_tokenizer) == [1, 2]


@pytest.mark.parametrize("streaming", [False, True])
def test_blank_rows_are_left_out_and_counted(write: Write, gpt_tokenizer: Any, streaming: bool) -> None:
    lines = [{"text": None}, {"text": ""}, {"text": " \t"}, {"text": "w1"}, {"text": "w2"}]
    path = write("a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    source = load_source(DataConfig(dataset=path, holdout=0, streaming=streaming), gpt_tokenizer, "text")
    assert (source.skipped, source.num_train) == (3, 2)


def test_a_folder_is_read_whole_or_by_split(write: Write, gpt_tokenizer: Any, tmp_path: Path) -> None:
    write("whole/a.jsonl", CONTENT["jsonl"])
    write("whole/deep/b.txt.gz", "w7\nw8\n")
    write("whole/.hidden.txt", "w9\n")
    write("whole/LICENSE", "w9\n")
    assert trained_words(str(tmp_path / "whole"), gpt_tokenizer) == [0, 1, 2, 3, 4, 5, 7, 8]
    write("split/train-0.jsonl.gz", '{"text": "w1"}\n')
    write("split/train-1.jsonl.gz", '{"text": "w2"}\n')
    write("split/dev.jsonl", '{"text": "w3"}\n')
    write("split/eval/0.jsonl", '{"text": "w4"}\n')
    folder = str(tmp_path / "split")
    assert trained_words(folder, gpt_tokenizer) == [1, 2]
    assert trained_words(folder, gpt_tokenizer, split="validation") == [3]
    assert trained_words(folder, gpt_tokenizer, split="test") == [4]
    with pytest.raises(DataError, match="got split 'other', expected one of: test, train, validation"):
        trained_words(folder, gpt_tokenizer, split="other")


def test_a_saved_data_set(gpt_tokenizer: Any, tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    table = Dataset.from_dict({"text": TEXTS})
    table.save_to_disk(tmp_path / "one")
    DatasetDict({"train": table.select([0]), "test": table.select([1, 2])}).save_to_disk(tmp_path / "two")
    assert trained_words(str(tmp_path / "one"), gpt_tokenizer) == [0, 1, 2, 3, 4, 5]
    assert trained_words(str(tmp_path / "one"), gpt_tokenizer, streaming=True) == [0, 1, 2, 3, 4, 5]
    assert trained_words(str(tmp_path / "two"), gpt_tokenizer, split="test") == [1, 2]
    with pytest.raises(DataError, match="expected one of: test, train"):
        trained_words(str(tmp_path / "two"), gpt_tokenizer, split="validation")


@pytest.mark.parametrize(
    ("row", "options", "found"),
    [
        ({"other": "x", "sentence": "w1"}, {}, 1),
        ({"sentence": "x", "text": "w2"}, {}, 2),
        ({"odd name": "w3", "number": 4}, {}, 3),
        ({"text": "x", "odd": "w4"}, {"text_column": "odd"}, 4),
    ],
)
def test_the_text_column_is_found(
    write: Write, gpt_tokenizer: Any, row: dict[str, Any], options: dict[str, Any], found: int
) -> None:
    assert trained_words(write("a.jsonl", json.dumps(row)), gpt_tokenizer, **options) == [found]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"a": "x", "b": "y", "n": 1},
            {},
            r"got 2 columns .* set text_column .*: a \(text\), b \(text\), n \(number\)",
        ),
        ({"n": 1}, {}, r"got 0 columns .*: n \(number\)"),
        ({"text": "x"}, {"text_column": "body"}, r"got no column 'body', expected one of: text \(text\)"),
        ({"text": "x", "n": 1}, {"text_column": "n"}, r"got number in column 'n', expected text"),
        ({"text": "x"}, {"text_pair_column": "p"}, r"got no column 'p'"),
        ({"text": "x"}, {"text_pair_column": "text"}, r"the same column for two purposes"),
        ({"text": "x", "l": [[1], [2]]}, {"label": "l"}, r"got list in column 'l'"),
    ],
)
def test_wrong_columns_are_named(
    write: Write, row: dict[str, Any], options: dict[str, Any], message: str, streaming: bool
) -> None:
    path, columns = write("a.jsonl", json.dumps(row)), {key: name for key, name in options.items() if key != "label"}
    with pytest.raises(DataError, match=message) as caught:
        open_records(path, DataConfig(streaming=streaming, **columns), "text", label=options.get("label"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", ""), ("a.jsonl.gz", " \n"), ("a.json", "[]"), ("a.csv", "text\n"), ("a.txt", "\n\n"), ("a.tsv", "")],
)
def test_an_empty_file_is_called_empty(write: Write, gpt_tokenizer: Any, name: str, text: str) -> None:
    with pytest.raises(DataError, match="is empty"):
        load_source(DataConfig(dataset=write(name, text)), gpt_tokenizer, "text")


def test_nothing_but_blank_rows_is_called_empty(write: Write, gpt_tokenizer: Any) -> None:
    path = write("a.jsonl", '{"text": " "}\n{"text": ""}\n')
    with pytest.raises(DataError, match="is empty: all 2 rows are blank"):
        load_source(DataConfig(dataset=path), gpt_tokenizer, "text")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "w1"}\n{nope\n', "cannot read 'a.jsonl' as json: .*JSON parse error: .* in row 1"),
        ("a[1].txt.gz", "w1", "a .gz file with a bracket in its path, expected none; rename it"),
        ("a.parquet", "no parquet", "cannot read 'a.parquet' as parquet"),
        ("a.csv", "text,label\nw1, w2,1\nw3,0\n", "cannot read 'a.csv' as csv: .* its header has 2 fields"),
        ("a.tsv", "text\tlabel\nw1\t1\t\nw3\t0\n", "cannot read 'a.tsv' as tsv: .* its header has 2 fields"),
        ("a.xyz", "x", "got a file ending in '.xyz', expected .json"),
        ("a.zip", "no zip", "cannot read 'a.zip' as a zip file"),
    ],
)
def test_damaged_files_are_named(
    write: Write, gpt_tokenizer: Any, capfd: pytest.CaptureFixture[str], name: str, text: str, message: str
) -> None:
    modality: Any = "image" if name == "a.zip" else "text"
    processor = gpt_tokenizer if modality == "text" else (lambda **_: None)
    with pytest.raises(DataError, match=message) as caught:
        load_source(DataConfig(dataset=write(name, text)), processor, modality)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_cache_that_cannot_be_written_is_named(
    write: Write, gpt_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message called the file damaged: "repair the file or get it again"."""
    cache = Path(write("no-folder", "")) / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(cache))
    with pytest.raises(
        DataError, match=r"'a\.jsonl': the cache of `datasets`, .*/cache', cannot be written \(Not a dir"
    ):
        load_source(DataConfig(dataset=write("a.jsonl", CONTENT["jsonl"])), gpt_tokenizer, "text")

    for error, why in (
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("Not enough disk space. Needed: Unknown size (download: Unknown size"), "disk full"),
    ):
        monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=error))
        with pytest.raises(DataError, match=rf"cannot be written \({why}\); make room there"):
            load_source(DataConfig(dataset=str(tmp_path / "a.jsonl")), gpt_tokenizer, "text")


def test_brackets_in_a_name(write: Write, gpt_tokenizer: Any) -> None:
    assert trained_words(write("a [1]*.jsonl", CONTENT["jsonl"]), gpt_tokenizer) == [0, 1, 2, 3, 4, 5]


def test_damage_further_on_in_a_stream(write: Write, gpt_tokenizer: Any, tmp_path: Path) -> None:
    write("folder/a.jsonl", CONTENT["jsonl"])
    write("folder/b.jsonl", '{"text": "w1"}\n{nope\n')
    config = DataConfig(dataset=str(tmp_path / "folder"), streaming=True, holdout=0, batch_size=1)
    with pytest.raises(DataError, match=r"cannot read 'b\.jsonl' as json: .* in row 1"):
        load_source(config, gpt_tokenizer, "text")


def test_a_damaged_gzip_and_bytes_that_are_no_text(tmp_path: Path, gpt_tokenizer: Any) -> None:
    (tmp_path / "a.txt.gz").write_bytes(b"no gzip")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xff\n")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"w1 " * 5000)[:40])
    for name in ("a.txt.gz", "b.txt", "c.txt.gz"):
        with pytest.raises(DataError, match=f"cannot read '{name}'"):
            load_source(DataConfig(dataset=str(tmp_path / name)), gpt_tokenizer, "text")


def test_missing_paths_and_folders_without_data(tmp_path: Path, gpt_tokenizer: Any) -> None:
    for name in ("missing.jsonl", "./missing", str(tmp_path / "missing")):
        with pytest.raises(DataError, match="does not exist, expected a file or a folder"):
            load_source(DataConfig(dataset=name), gpt_tokenizer, "text")
    with pytest.raises(DataError, match="got no file of a known kind, expected"):
        load_source(DataConfig(dataset=str(tmp_path)), gpt_tokenizer, "text")
    with pytest.raises(DataError, match="no such file or folder, and not a Hub name"):
        load_source(DataConfig(dataset="a/b/c"), gpt_tokenizer, "text")
