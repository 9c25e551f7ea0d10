"""Broken data files: one line that says what was got and what was expected, and nothing written; or it works."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import pytest
from support.checkpoints import WORDS, make_text
from support.command_lines import changed

from linearize.core.errors import DataError
from linearize.data import local
from linearize.data.local import exists, files_in

VERBS = ("convert", "align", "finetune", "evaluate")
ROWS = [{"text": " ".join(random.Random(n).choices(WORDS, k=6)), "label": n % 2} for n in range(40)]
JUNK = random.Random(0).randbytes(4_000)
MEGABYTES = 5_000_000


def lines(rows, *more):
    return ("\n".join([*(json.dumps(row) for row in rows), *more]) + "\n").encode()


def labelled(*labels):
    return lines({**row, "label": labels[n % len(labels)]} for n, row in enumerate(ROWS))


def zipped(content):
    return gzip.compress(content, mtime=0)


MANY = zipped(lines(random.Random(n).choice(ROWS) | {"n": n} for n in range(3_000)))
TABLE = b"text,label\n" + b"".join(f"{row['text']},{row['label']}\n".encode() for row in ROWS)
LATIN = "th\xe9 cat".encode("latin-1")

REFUSED = {
    "cut.jsonl.gz": (MANY[: len(MANY) // 2], "Compressed file ended before the end-of-stream marker"),
    "cut-by-four.jsonl.gz": (MANY[:-4], "Compressed file ended before the end-of-stream marker"),
    "wrong-sum.jsonl.gz": (MANY[:-8] + bytes(8), "CRC check failed"),
    "junk.jsonl": (JUNK, "cannot read 'junk.jsonl' as json: ArrowInvalid: JSON parse error: Invalid value. in row 0"),
    "junk.csv": (JUNK, "expected a header and rows with the same number of fields in UTF-8"),
    "junk.parquet": (JUNK, "expected a complete parquet file"),
    "junk.txt": (JUNK, "expected lines of text in UTF-8"),
    "junk.jsonl.gz": (JUNK, "Not a gzipped file"),
    "zeros.jsonl": (bytes(4_000), "is empty: got no rows"),
    "broken-line.jsonl": (lines(ROWS[:20], '{"text": "the cat', json.dumps(ROWS[20])), "in string. in row 20"),
    "no-object.jsonl": (lines(ROWS[:20], "[1, 2]", json.dumps(ROWS[20])), "expected objects with the same fields"),
    "deep.jsonl": (lines(ROWS, '{"text": ' + "[" * 2_000 + "]" * 2_000 + "}"), "decoding depth limit"),
    "ragged.csv": (TABLE + b"the cat,1,2,3\n", "Expected 2 fields in line 42, saw 4"),
    "empty.jsonl": (b"", "is empty: got no rows"),
    "empty.csv": (b"", "is empty: got no rows"),
    "empty.parquet": (b"", "Parquet file size is 0 bytes"),
    "empty.jsonl.gz": (zipped(b""), "is empty: got no rows"),
    "header.csv": (b"text,label\n", "is empty: got no rows"),
    "blank-lines.jsonl": (b"\n \n\n", "is empty: got no rows"),
    "blank-rows.jsonl": (lines({"text": " \t", "label": 1} for _ in range(40)), "all 40 rows are blank"),
    "no-fields.jsonl": (lines({} for _ in range(40)), "is empty: got no rows"),
    "mixed.jsonl": (lines(ROWS, '{"text": 5, "label": 1}'), "got json in column 'text', expected text"),
    "numbers.jsonl": (lines({"text": n, "label": 1} for n in range(40)), "got number in column 'text', expected text"),
    "lists.jsonl": (lines({"text": [1], "label": 1} for _ in range(40)), "got numbers in column 'text', expected"),
    "latin.jsonl": (lines(ROWS) + b'{"text": "%s", "label": 1}\n' % LATIN, "in UTF-8"),
    "latin.csv": (TABLE + LATIN + b",1\n", "'utf-8' codec can't decode byte 0xe9"),
    "wide.jsonl": (lines(ROWS).decode().encode("utf-16"), "in UTF-8"),
    "surrogate.jsonl": (lines(ROWS, '{"text": "\\ud800", "label": 1}'), "surrogate pair in string is invalid"),
    "letter.doc": (b"text", "got a file ending in '.doc', expected .json"),
    "no-type": (b"text", "got a file ending in '', expected .json"),
}
"""Name of a file: its content, and what every verb says about it."""

LABELS = {
    "no-label.jsonl": (lines({"text": row["text"]} for row in ROWS), "got no column 'label', expected one of: text"),
    "null-labels.jsonl": (labelled(None), "got null in column 'label', expected"),
    "one-name.jsonl": (labelled("good"), "got only the class 'good' in column 'label', expected at least two"),
    "one-number.jsonl": (labelled(1), "got only the class 1 in column 'label', expected at least two"),
    "mixed-labels.jsonl": (labelled("good", 1), "got json in column 'label', expected"),
    "negative.jsonl": (labelled(0, -1), "got the label -1 in column 'label', expected class names or whole numbers"),
    "infinite.jsonl": (labelled(0, float("inf")), "got the label inf in column 'label', expected class names or whole"),
    "huge.jsonl": (labelled(0, 10**9), "got the label 1000000000 in column 'label', expected class names or"),
    "list-labels.jsonl": (labelled([[1]]), "got list in column 'label', expected"),
}
"""The same of labels, which only tasks read."""

WORKS = {
    "some-labels.jsonl": (labelled(0, 1, None), "13 blank or unlabelled left out"),
    "some-nan.jsonl": (labelled(0, 1, float("nan"), 0), "10 blank or unlabelled left out"),
    "some-blank.jsonl": (lines([*ROWS, *({"text": " ", "label": 1} for _ in range(3))]), "3 blank or unlabelled left"),
    "mark.csv": (b"\xef\xbb\xbf" + TABLE, "36 rows to train on"),
    "nul.jsonl": (lines([*ROWS, {"text": "the \0 cat", "label": 1}]), "37 rows to train on"),
}


@pytest.fixture(scope="session")
def tuned(models):
    return make_text(models / "tuned", head="AutoModelForSequenceClassification")


@pytest.fixture
def words(models, tuned, tmp_path):
    """Make the words of a verb's command line on some data."""

    def make(verb, data):
        given = ["--dataset", data, "--device", "cpu"]
        texts = [*given, "--text-column", "text", "--holdout", 4, "--batch-size", 4]
        task = [*given, "--task", "text-classification", "--columns", "text", "--max-length", 16, "--batch-size", 8]
        out = ["--output", tmp_path / "out"]
        return {
            "convert": ["convert", models / "bert", *texts, "--distill-steps", 1, *out],
            "align": ["align", models / "hedgehog", *texts, "--length", 16, "--steps", 1, *out],
            "finetune": ["finetune", models / "hedgehog", *task, "--steps", 1, *out],
            "evaluate": ["evaluate", tuned, *task],
        }[verb]

    return make


def put(folder, name, content):
    (folder / name).write_bytes(content)
    return folder / name


@pytest.fixture
def refused(cli, words, tmp_path):
    """Check that verbs refuse data in one line, with nothing at the output or beside it."""

    def check(data, said, verbs=VERBS, **changes):
        before = sorted(tmp_path.iterdir())
        for verb in verbs:
            line = words(verb, data)
            for option, value in changes.items():
                line = changed(line, f"--{option}", value)
            code, _, err = cli(line)
            assert code == 2 and err.startswith("linearize: error: ") and err.count("\n") == 1, err
            assert said in err and ("expected" in err or "pass a local file" in err or "check the name" in err), err
            assert sorted(tmp_path.iterdir()) == before

    return check


@pytest.mark.sampled("values")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", REFUSED)
def test_one_line(name, verb, refused, tmp_path):
    content, said = REFUSED[name]
    refused(put(tmp_path, name, content), said, [verb])


@pytest.mark.parametrize("name", LABELS)
def test_one_line_for_labels(name, refused, tmp_path):
    content, said = LABELS[name]
    # A class for each number up to the largest would take minutes and all memory.
    refused(put(tmp_path, name, content), said, ("finetune", "evaluate"))


@pytest.mark.parametrize("name", WORKS)
def test_what_is_usable_is_used_and_the_rest_counted(name, cli, words, tmp_path):
    content, said = WORKS[name]
    code, out, err = cli(words("evaluate", put(tmp_path, name, content)))
    assert code == 0 and said in " ".join(out.split()), out + err


def test_training_without_labels_works(cli, words, tmp_path):
    """Stage one and the alignment read no labels; tuning counts the rows it leaves out."""
    data = put(tmp_path, "one-name.jsonl", LABELS["one-name.jsonl"][0])
    assert cli(words("convert", data))[0] == 0
    tuning = words("finetune", put(tmp_path, "some.jsonl", WORKS["some-labels.jsonl"][0]))
    code, out, err = cli([*tuning[:-1], tmp_path / "tuned"])
    assert code == 0 and "13 blank or unlabelled left out" in " ".join(out.split()), out + err


TAGGED = {"tokens": ["the", "cat"], "ner_tags": [0, 1]}
ASKED = {"question": "who sat", "context": "the cat sat", "answers": {"text": ["the cat"], "answer_start": [0]}}
OTHERS = {
    "tags missing": (
        "token-classification",
        "tokens",
        {**TAGGED, "ner_tags": None},
        "got tag None in column 'ner_tags'",
    ),
    "tag huge": ("token-classification", "tokens", {**TAGGED, "ner_tags": [0, 10**9]}, "got tag 1000000000 in column"),
    "tag negative": ("token-classification", "tokens", {**TAGGED, "ner_tags": [0, -1]}, "got tag -1 in column"),
    "words missing": ("token-classification", "tokens", {**TAGGED, "tokens": None}, "got 'None' with '[0, 1]'"),
    "a word missing": (
        "token-classification",
        "tokens",
        {**TAGGED, "tokens": ["the", None]},
        "expected a list of words",
    ),
    "question missing": ("question-answering", "question,context", {**ASKED, "question": None}, "without question or"),
    "answer missing": ("question-answering", "question,context", {**ASKED, "answers": None}, "got answers None"),
    "text missing": ("causal-lm", "txt", {"text": "a"}, "got no column 'txt', expected it among its columns: text"),
    "number for text": ("causal-lm", "text", {"text": 5}, "got number in column 'text', expected text"),
    "number for text, masked": ("masked-lm", "text", {"text": 5}, "got number in column 'text', expected text"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_one_line_for_other_tasks(case, refused, tmp_path):
    task, columns, odd, said = OTHERS[case]
    good = {"token-classification": [TAGGED] * 20, "question-answering": [ASKED] * 20}.get(task, [odd] * 19)
    data = put(tmp_path, "rows.jsonl", lines([*good, odd]))
    refused(data, said, ("finetune", "evaluate"), task=task, columns=columns)


GIANTS = {
    "words.jsonl": ("convert", lines([*ROWS[:7], {"text": "the cat sat " * (MEGABYTES // 12), "label": 1}])),
    "word.jsonl": ("align", lines([*ROWS[:7], {"text": "x" * MEGABYTES, "label": 1}])),
    "word.csv": ("evaluate", TABLE + b"x" * MEGABYTES + b",1\n"),
}
"""Stage one and the alignment hold four rows out and train on four: the giant is read either way."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "word.csv")) for n in GIANTS])
def test_a_row_of_five_megabytes_works(name, cli, words, tmp_path):
    verb, content = GIANTS[name]
    code, _, err = cli(words(verb, put(tmp_path, name, content)))
    assert code == 0, err


def test_a_folder_of_links_is_read(cli, words, tmp_path):
    """Links to files and to folders; a link to the folder itself ends nothing."""
    put(tmp_path, "rows.jsonl", lines(ROWS[:20]))
    (tmp_path / "elsewhere").mkdir()
    put(tmp_path / "elsewhere", "more.jsonl", lines(ROWS[20:]))
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "rows.jsonl").symlink_to(tmp_path / "rows.jsonl")
    (folder / "inner").symlink_to(tmp_path / "elsewhere")
    (folder / "itself").symlink_to(folder)
    (tmp_path / "elsewhere" / "up").symlink_to(folder)
    names = [str(path.relative_to(folder)) for path in files_in(folder)]
    assert names == ["inner/more.jsonl", "rows.jsonl"]
    code, out, err = cli(words("evaluate", folder))
    assert code == 0 and "36 rows to train on" in out and "4 held-out rows" in " ".join(out.split()), err
    assert cli(words("convert", folder))[0] == 0


def test_links_that_lead_nowhere_are_named(refused, tmp_path):
    put(tmp_path, "rows.jsonl", lines(ROWS))
    for name, target in (("a.jsonl", "b.jsonl"), ("b.jsonl", "a.jsonl"), ("gone.jsonl", "nothing.jsonl")):
        (tmp_path / name).symlink_to(tmp_path / target)
        refused(tmp_path / name, f"{name}', which leads nowhere, expected a file or a folder; repair it", VERBS[:1])
    for name in ("a.jsonl", "gone.jsonl"):
        folder = tmp_path / f"with-{name}"
        folder.mkdir()
        (folder / "rows.jsonl").symlink_to(tmp_path / "rows.jsonl")
        (folder / "z.jsonl").symlink_to(tmp_path / name)
        refused(folder, "z.jsonl', which leads nowhere, expected a file or a folder; repair it")


def test_folders_without_data(refused, tmp_path):
    for name in ("none", "letters", "named.jsonl"):
        (tmp_path / name).mkdir()
        put(tmp_path / name, ".hidden.jsonl", lines(ROWS))
    put(tmp_path / "letters", "a.doc", b"text")
    for name in ("none", "letters", "named.jsonl"):
        refused(tmp_path / name, f"{name!r}: got no file of a known kind, expected .json")


def test_names_with_a_typo(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "rows.jsonl", lines(ROWS))
    refused("row.jsonl", "got 'row.jsonl', which does not exist, expected a file or a folder; check the path")
    refused(tmp_path / "row", "row', which does not exist, expected a file or a folder; check the path")
    refused("nyu-mll/gleu:cola", "got data set 'nyu-mll/gleu:cola': no such file or folder, not in the cache")
    refused("x" * 300, "File name too long); check the name")
    refused("x" * 300 + ".jsonl", "File name too long); check the name")
    refused("", "got an empty data")


def test_pipes_and_devices_are_not_waited_for(refused, tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "device.jsonl").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "device.jsonl"):
        refused(tmp_path / name, f"{name}', which is a pipe or a device, expected a file or a folder")


def test_what_may_not_be_read(refused, tmp_path, monkeypatch):
    """The test refuses in place of the system, as root may read all."""
    file = put(tmp_path, "rows.jsonl", lines(ROWS))
    (tmp_path / "folder").mkdir()
    put(tmp_path / "folder", "rows.jsonl", lines(ROWS))

    def forbid(name):
        real = getattr(Path, name)

        def refuse(self, *more, **options):
            if self in (file, tmp_path / "folder"):
                raise PermissionError(13, "Permission denied", str(self))
            return real(self, *more, **options)

        monkeypatch.setattr(Path, name, refuse)

    forbid("iterdir")
    refused(tmp_path / "folder", "cannot read folder 'folder': PermissionError")
    refused(tmp_path / "folder", "cannot read folder 'folder': PermissionError", VERBS[3:], task="cola")
    real = open

    def refuse(name, *more, **options):
        if str(name) == str(file):
            raise PermissionError(13, "Permission denied", str(name))
        return real(name, *more, **options)

    monkeypatch.setattr("builtins.open", refuse)
    refused(file, "cannot read 'rows.jsonl' as json: PermissionError")
    forbid("is_file")
    refused(file, "(PermissionError: Permission denied); check the name")


def test_links_cannot_blow_a_folder_up(tmp_path, monkeypatch):
    """Folders that link to each other have as many paths as there are orders of them."""
    for name in "abcdefgh":
        (tmp_path / name).mkdir()
    for name in "abcdefgh":
        for other in "abcdefgh":
            (tmp_path / name / other).symlink_to(tmp_path / other)
    monkeypatch.setattr(local, "MOST_FOLDERS", 500)
    with pytest.raises(DataError, match="got more than 500 folders"):
        list(files_in(tmp_path))


def test_exists(tmp_path):
    assert exists(tmp_path) and exists(put(tmp_path, "a", b"")) and not exists(tmp_path / "b")
    assert not exists(tmp_path / "a" / "b") and not exists(Path("a\0b"))
