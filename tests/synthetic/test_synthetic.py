"""Data made here: right answers, published sizes, and the same rows for the same seed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from linearize.core.errors import ConfigError, DataError, UnknownNameError
from linearize.jobs.synthetic import sets
from linearize.jobs.synthetic import texts as made_texts
from linearize.jobs.synthetic.sets import SETS, make, pixel_text
from linearize.jobs.synthetic.tokenizers import SPECIAL, make_tokenizer


def evaluate(text: str) -> int:
    """Compute the value of a list from its text."""
    stack: list[tuple[str, list[int]]] = [("", [])]
    for token in text.split():
        if token in sets.OPERATORS:
            stack.append((token, []))
        elif token == sets.END:
            name, values = stack.pop()
            stack[-1][1].append(sets.OPERATORS[name](values))
        else:
            stack[-1][1].append(int(token))
    return stack[0][1][0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MIN [MAX 1 2 ] 8 ]", 2),
        ("[MED 1 5 4 ]", 4),
        ("[MED 1 4 ]", 2),
        ("[SM 9 8 [SM 7 7 ] ]", 1),
    ],
)
def test_listops_values(text, value):
    assert evaluate(text) == value


def test_listops_rows_are_right_and_of_the_published_lengths():
    config = sets.ListOps(train=6, validation=3)
    found = config.make()
    assert len(found["train"]) == 6 and len(found["validation"]) == 3
    texts = [row["text"] for rows in found.values() for row in rows]
    assert len(set(texts)) == 9
    for rows in found.values():
        for row in rows:
            tokens = row["text"].split()
            assert 500 <= len(tokens) <= 2000 and set(tokens) <= set(sets.TOKENS)
            assert evaluate(row["text"]) == row["label"]
            depth = deepest = 0
            for token in tokens:
                depth += (token in sets.OPERATORS) - (token == "]")
                deepest = max(deepest, depth)
            assert depth == 0 and deepest < 10
    assert found == config.make()
    assert found != sets.ListOps(train=6, validation=3, seed=1).make()


def test_listops_grammar():
    config = sets.ListOps(shortest=1)
    chance, operators = random.Random(0), 0
    for _ in range(2000):
        tokens: list[str] = []
        try:
            sets.draw(chance, config, tokens, 1)
        except sets.TooLongError:
            continue
        operators += len(tokens) > 1
    assert 0.2 < operators / 2000 < 0.3


def test_recall_ends_in_a_key_seen_before():
    config = sets.AssociativeRecall(train=20, validation=5)
    found = config.make()
    for row in found["train"]:
        tokens = row["text"].split()
        assert len(tokens) == 128 and len(set(tokens)) <= 40
        seen: dict[str, str] = {}
        for place in range(0, 128, 2):
            assert (place + 1 in row["positions"]) == (tokens[place] in seen)
            assert seen.setdefault(tokens[place], tokens[place + 1]) == tokens[place + 1]
        assert row["positions"][-1] == 127
    assert all(row["positions"] == [127] for row in found["validation"])
    keys = sum(len(row["text"].split()) // 2 for row in found["train"]) / 20 / 20
    assert keys == pytest.approx(3.2), "a key comes up three times on average, as in the paper"
    assert config.make() == found


def test_made_sets_have_tables_and_tokenizers():
    made, tokenizer = make("listops", {"train": 3, "validation": 2, "shortest": 10, "longest": 60})
    row = made["train"][0]
    ids = tokenizer(row["text"])["input_ids"]
    assert ids[0] == tokenizer.cls_token_id and len(ids) == len(row["text"].split()) + 1
    assert tokenizer.unk_token_id not in ids
    made, tokenizer = make("associative-recall", {"train": 3, "validation": 2})
    assert len(tokenizer(made["train"][0]["text"])["input_ids"]) == 128


def test_pixels_of_an_image_set(tmp_path):
    from PIL import Image

    for split in ("train", "test"):
        for name, value in (("dark", 0), ("light", 255)):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (6, 6), (value,) * 3).save(folder / f"{number}.png")
    made, _ = make("pixels", {"side": 4}, str(tmp_path))
    assert len(made["train"]) == 6 and len(made["validation"]) == 6
    rows = made["train"]
    assert {(row["text"].split()[0], row["label"]) for row in rows} == {("0", 0), ("255", 1)}
    assert len(rows[0]["text"].split()) == 16
    values = np.arange(16, dtype=np.uint8).reshape(4, 4)
    assert pixel_text(Image.fromarray(values), 4) == " ".join(map(str, range(16)))


def test_retrieval(tmp_path):
    texts = [f"{chr(97 + i) * 4}{chr(65 + i) * 4}" for i in range(9)]
    rows = made_texts.halves(made_texts.Halves(longest=3), texts)
    for row in rows:
        assert len(row["text1"]) == len(row["text2"]) == 3
        assert (row["text1"][0] == row["text2"][0].lower()) == bool(row["label"])
    for half in ("text1", "text2"):
        assert len({row[half] for row in rows}) == 9
        for label in (0, 1):
            assert len({row[half] for row in rows if row["label"] == label}) == 9, "no half tells the label by itself"
    long = [f"{text}{text.upper()}" for text in texts[:5]]
    rows = made_texts.halves(made_texts.Halves(longest=8, shortest=16), texts + long)
    assert len(rows) == 10 and all(len(row["text1"]) == len(row["text2"]) == 8 for row in rows), "no length tells"
    with pytest.raises(DataError, match=r"got 1 texts of 16 characters or more"):
        made_texts.halves(made_texts.Halves(shortest=16), texts + long[:1])
    texts_of_ten = [f"{n}{n}{n}abcd{n}{n}{n}" for n in range(4)]
    for row in made_texts.halves(made_texts.Halves(longest=6, overlap=4), texts_of_ten):
        first, second = row["text1"], row["text2"]
        assert first[2:] == second[:4] == "abcd" and (first[0] == second[-1]) == bool(row["label"])
    for wrong in ({"shortest": -1}, {"overlap": -1}, {"longest": 5, "overlap": 5}):
        with pytest.raises(ConfigError, match=r"halves, (shortest|overlap): got -1|expected less than longest"):
            made_texts.Halves(**wrong)
    (tmp_path / "set.txt").write_text("\n".join(texts * 6))
    made, _ = make("retrieval-halves", {"longest": 4}, str(tmp_path / "set.txt"))
    assert set(made["train"].column_names) == {"text1", "text2", "label"}


def test_documents(tmp_path):
    texts, other = tmp_path / "texts", tmp_path / "other"
    texts.mkdir()
    other.mkdir()
    for split in ("train", "validation"):
        rows = [{"text": f"{split}{n} is a text of ours", "label": n % 2} for n in range(6)]
        # A row without a text ended in a traceback, and one without a label was a class.
        rows += [{"text": None, "label": 0}, {"text": "a text without a class", "label": None}]
        (texts / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines = [f"{split}line{n} stands between and is long" for n in range(9)] + ["too short"] * 9
        (other / f"{split}.txt").write_text("\n".join(lines) + "\n")
    plain = {"words": 4, "parts": 3, "train": 40, "validation": 8}
    made, _ = make("documents", {"filler": "other", **plain}, str(texts))
    places = set()
    for split, table in made.items():
        for row in table:
            parts = [part.split() for part in row["text"].split("\n")]
            assert [len(part) for part in parts] == [4, 4, 4]
            decides = parts.pop(row["places"][0])
            assert decides[1:] == ["is", "a", "text"] and row["label"] == int(decides[0].removeprefix(split)) % 2
            assert len({part[0] for part in parts}) == 2
            assert all(part[0].startswith(f"{split}line") and part[1] == "stands" for part in parts)
            places.add(row["places"][0])
    assert places == {0, 1, 2}
    again, other = (make("documents", {"filler": "other", **plain, "seed": seed}, str(texts))[0] for seed in (0, 1))
    assert again["train"][:] == made["train"][:] != other["train"][:]
    with pytest.raises(DataError, match="got 0 other texts of at least 8 words, expected at least the 3"):
        make("documents", {"filler": "other", **plain, "words": 8}, str(texts))
    with pytest.raises(DataError, match="got data set 'othr': no such file or folder"):
        make("documents", {"filler": "othr", **plain}, str(texts))
    with pytest.raises(ConfigError, match="documents: got no filler"):
        make("documents", plain, str(texts))


def test_documents_of_two_texts_that_decide(tmp_path):
    texts, other = tmp_path / "texts", tmp_path / "other"
    texts.mkdir()
    other.mkdir()
    for split in ("train", "validation"):
        rows = [{"text": f"{split}{n} is a text", "label": "abc"[n % 3]} for n in range(9)]
        (texts / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (other / f"{split}.txt").write_text("\n".join(f"{split}line{n} stands between" for n in range(9)) + "\n")
    options = {"decides": "last", "filler": "other", "words": 3, "parts": 6, "apart": 3, "train": 300}
    made, _ = make("documents", options | {"validation": 40}, str(texts))
    apart, first, same = set(), set(), 0
    for split, table in made.items():
        for row in table:
            parts = [part.split() for part in row["text"].split("\n")]
            assert len({part[0] for part in parts}) == 6, "no text comes twice"
            one, two = row["places"]
            apart.add(two - one)
            first.add(one)
            classes = ["abc"[int(parts[n][0].removeprefix(split)) % 3] for n in (one, two)]
            agree = classes[0] == classes[1]
            assert row["label"] == classes[1]
            same += agree
    assert apart == {3, 4, 5} and first == {0, 1, 2}
    assert 130 < same < 210, "as many agree as not, of 340"


def test_what_documents_refuse(tmp_path):
    with pytest.raises(ConfigError, match=r"documents, decides: got 'agree', expected one of one, last"):
        make("documents", {"decides": "agree", "filler": "x"}, str(tmp_path))
    with pytest.raises(ConfigError, match="apart: got 6, expected 1 to 5 of 6 parts"):
        make("documents", {"decides": "last", "apart": 6, "filler": "x"}, str(tmp_path))
    with pytest.raises(ConfigError, match="parts: got 1, expected 2 or more, as two of them decide"):
        make("documents", {"decides": "last", "parts": 1, "filler": "x"}, str(tmp_path))
    for split in ("train", "validation"):
        rows = [{"text": f"{split}{n} is a text", "label": int(n == 0)} for n in range(9)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="classes 0: 8, 1: 1, expected two classes or more with two texts each"):
        make("documents", {"decides": "last", "filler": str(tmp_path), "words": 3}, str(tmp_path))


def test_byte_tokenizer():
    made = make_tokenizer("bytes")
    assert len(made) == len(SPECIAL) + 256
    text = "né\n " * 500
    ids = made(text)["input_ids"]
    assert len(ids) == 1 + len(text.encode()) and ids[0] == made.cls_token_id
    assert made.decode(ids[1:]) == text
    pair = made("ab", "c")["input_ids"]
    assert pair.count(made.sep_token_id) == 1 and len(pair) == 5


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_learned_tokenizers(kind, tmp_path):
    from transformers import AutoTokenizer

    texts = ["the cat sat <unk> on the mat", "the dog"] * 20
    made = make_tokenizer(kind, texts, 300 if kind == "pieces" else None, framed=False)
    made.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("the cat")["input_ids"] == made("the cat")["input_ids"]
    assert again("<unk>")["input_ids"] == [again.unk_token_id]
    if kind == "words":
        assert len(made) == len(SPECIAL) + 6
        assert made("the zebra")["input_ids"][1] == made.unk_token_id
        assert sorted(made.get_vocab().values()) == list(range(len(made))), "every number is a row of the embedding"
        assert len(make_tokenizer(kind, texts, len(SPECIAL) + 3)) == len(SPECIAL) + 3


@pytest.mark.parametrize(
    ("name", "options", "source", "error", "message"),
    [
        ("listop", {}, None, UnknownNameError, "Did you mean 'listops'"),
        ("listops", {"lenght": 3}, None, UnknownNameError, "listops: unknown option 'lenght'"),
        ("listops", {"train": "many"}, None, ConfigError, "listops, train: got 'many', expected a whole number"),
        ("listops", {"depth": 2, "shortest": 500}, None, ConfigError, "no list of depth 2 has 500 tokens"),
        # Both drew lists for ever.
        ("listops", {"depth": 2, "shortest": 13, "train": 1, "validation": 1}, None, ConfigError, "has 13 tokens"),
        (
            "listops",
            {"shortest": 1, "longest": 1, "train": 9, "validation": 2},
            None,
            DataError,
            r"got 10 different lists of 1 to 1 tokens, then 200,000 draws without another, expected 11",
        ),
        ("listops", {"validation": -1}, None, ConfigError, "validation: got -1, expected a whole number of at least 1"),
        ("associative-recall", {"vocabulary": 5}, None, ConfigError, "expected even numbers"),
        ("pixels", {}, None, DataError, "pixels is made from an image data set"),
    ],
)
def test_bad_input(name, options, source, error, message):
    with pytest.raises(error, match=message):
        make(name, options, source)


def test_every_set_is_tested():
    # Articles are tested with the task that they are made for.
    here = Path(__file__)
    tests = [here, here.parents[1] / "finetune" / "test_retrieval.py"]
    assert all(any(f'"{name}"' in file.read_text() for file in tests) for name in SETS)
