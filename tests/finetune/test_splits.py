"""Which rows a task is measured on, and the error for a missing split."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset

from linearize.core.errors import DataError
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.splits import open_splits
from linearize.training.stage_two.tasks import task

ROWS = [{"sentence": f"sentence number {i}", "label": i % 2} for i in range(40)]


def write(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path):
    for name, count in (("train", 40), ("validation", 12), ("test", 8)):
        write(tmp_path / f"{name}.jsonl", ROWS[:count])
    return tmp_path


def splits(given, **changes):
    return open_splits(task("cola", **changes), given, DataOptions())


@pytest.mark.parametrize(("name", "count"), [(None, 12), ("validation", 12), ("test", 8), ("train", 40)])
def test_the_named_split_is_measured(folder, name, count):
    found = splits(str(folder), validation=name)
    assert len(found.validation) == count
    assert f"{count} rows of split {name or 'validation'}" in found.description


def test_a_folder_without_rows_to_train_on_is_measured(tmp_path):
    """It was refused for its lack of a split that measuring does not need."""
    write(tmp_path / "test.jsonl", ROWS[:8])
    measuring = DataOptions(trains=False)
    tables = {"validation": Dataset.from_list(ROWS[:8])}
    for given, split in ((str(tmp_path), "test"), (tables, "validation")):
        found = open_splits(task("cola"), given, measuring, raw=not isinstance(given, str))
        assert len(found.validation) == 8
        assert found.description.endswith(f": measured on 8 rows of split {split}")
        with pytest.raises(DataError, match="got split 'train', expected one of: "):
            splits(given)
    with pytest.raises(DataError, match="got split 'dev', expected one of: test"):
        open_splits(task("cola", validation="dev"), str(tmp_path), measuring)
    (tmp_path / "test.jsonl").rename(tmp_path / "unnamed.jsonl")
    assert "1 held-out rows" in open_splits(task("cola"), str(tmp_path), measuring).description


def test_a_split_that_is_not_there_is_an_error_that_lists_the_others(folder):
    with pytest.raises(DataError, match=r"got split 'dev', expected one of: test, train, validation"):
        splits(str(folder), validation="dev")


def test_a_file_has_no_splits_to_name(tmp_path):
    write(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"got split 'test', but the data has no splits"):
        splits(str(tmp_path / "rows.jsonl"), validation="test")
    found = splits(str(tmp_path / "rows.jsonl"))
    assert len(found.validation) == 4 and len(found.train) == 36
    assert "4 held-out rows, as it has no validation split" in found.description


def test_rows_to_train_on_that_are_also_measured_are_counted():
    """Scores on rows that were trained on are too good."""
    rows = [{"sentence": f"row {number % 20}", "label": number // 20 % 2} for number in range(60)]
    found = splits({"train": Dataset.from_list(rows)})
    texts, measured = ([one.value for one in view.fetch(range(len(view)))] for view in (found.train, found.validation))
    count = sum(text in measured for text in texts)
    assert f"split ({count} rows to train on have the same text or image as one of them)" in found.description
    apart = splits({"train": Dataset.from_list([{"sentence": f"row {number}", "label": 0} for number in range(60)])})
    assert "same text" not in apart.description


def test_tables_list_their_splits():
    tables = {"train": Dataset.from_list(ROWS), "dev": Dataset.from_list(ROWS[:6])}
    with pytest.raises(DataError, match=r"tables: got split 'test', expected one of: dev, train"):
        splits(tables, validation="test")
    assert len(splits(tables, validation="dev").validation) == 6
    # Without a name a tenth of the training rows is held out, and called that.
    assert "held-out rows" in splits({"train": tables["train"]}).description
