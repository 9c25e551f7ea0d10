"""The script that trains embedders on facts hidden in documents."""

import json
import re

import numpy as np
import pytest
import torch
from support.checkpoints import WORDS
from support.scripts import script
from support.tiny import converted, original
from transformers import BertTokenizer

from linearize.jobs.synthetic import texts


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "corpus").mkdir()
    for split in ("train", "validation"):
        lines = [f"= {split} {n} =\n" + " ".join(np.random.default_rng(n).choice(WORDS, 100)) for n in range(8)]
        (tmp_path / "corpus" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(dict.fromkeys(names))})
    for name, model in (
        ("softmax", original("bert")),
        ("whole", converted("bert", kernel="none", window=64, max_length=128)),
    ):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path


def test_what_is_trained_is_not_what_is_measured():
    needles = script("train_needles")
    assert not {*needles.PLACES} & {*texts.PLACES} and not {*needles.NAMES} & {*texts.NAMES}
    assert not {fact for fact, _ in needles.TOPICS} & {fact for fact, _ in texts.TOPICS}
    questions, documents = needles.documents(["hay"] * 90, 16, 20, np.random.default_rng(0))
    for question, document in zip(questions, documents, strict=True):
        (place,) = (place for place in needles.PLACES if re.search(rf"\b{place}\b", question))
        assert [place in other for other in documents].count(True) == 1 and place in document
        assert document.split().count("hay") == 20


def test_rows_are_trained_and_measured_once(folders, monkeypatch):
    needles = script("train_needles")
    monkeypatch.setattr(needles, "MEASURED", {"short": 50, "long": 90})
    monkeypatch.setattr(needles, "SHORTEST", 10)
    sizes = ["--data", str(folders / "corpus"), "--words", "20", "--steps", "3", "--batch-size", "4"]
    more = [*sizes, "--learning-rate", "1e-2", "--output", str(folders / "out")]
    needles.main([str(folders / "softmax"), "chunks", "--chunk", "9", *more])
    needles.main([str(folders / "whole"), "whole", *more])
    found = json.loads((folders / "out" / "results.json").read_text())
    assert [*found] == ["chunks", "whole"] and [*found["whole"]][-2:] == ["short", "long"]
    for row, ways in (("chunks", ["", "_by_best_chunk"]), ("whole", [""])):
        assert len(found[row]["losses"]) == 3
        # Six of sixteen articles are measured, 600 words.
        for length, count in (("short", 12), ("long", 6)):
            for way in ways:
                order = found[row][length][f"ranks{way}"]
                assert len(order) == count and found[row][length][f"found{way}"] == order.count(1)
    # A trained row is read again, not trained again: its figures come from the saved weights.
    del found["whole"]["long"]
    (folders / "out" / "results.json").write_text(json.dumps(found))
    monkeypatch.setattr(needles, "train", None)
    needles.main([str(folders / "whole"), "whole", *more])
    again = json.loads((folders / "out" / "results.json").read_text())
    assert again["whole"]["losses"] == found["whole"]["losses"] and len(again["whole"]["long"]["ranks"]) == 6


def test_chunks_are_averaged(folders):
    embedder = script("train_needles").Embedder(str(folders / "softmax"), 7)
    embedder.model.eval()
    text = " ".join(WORDS[:12])
    ids = embedder.tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [[2, *ids[begin : begin + 5], 3] for begin in (0, 5, 10)]
    with torch.no_grad():
        each = [embedder.model(torch.tensor([piece])).last_hidden_state[0].mean(0) for piece in pieces]
        torch.testing.assert_close(embedder.chunks(text), torch.stack(each), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(embedder([text])[0], torch.stack(each).mean(0), rtol=1e-4, atol=1e-5)
