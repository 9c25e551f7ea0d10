"""Tiny softmax models in folders, made once."""

import json

import pytest
from support.checkpoints import FAMILIES, WORDS, tokenizer
from support.pictures import cheap_pictures
from support.tiny import original
from transformers import ViTImageProcessor


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Checkpoints of tiny models, with tokenizer or image processor, and a data set."""
    root = tmp_path_factory.mktemp("models")
    for name, (head, _) in FAMILIES.items():
        # RoBERTa's table has two rows for itself.
        overrides = {"max_position_embeddings": 66} if name == "roberta" else {}
        original(name, head, **overrides).save_pretrained(root / name)
        processor = ViTImageProcessor(size={"height": 30, "width": 30}) if name == "vit" else tokenizer(ends=False)
        processor.save_pretrained(root / name)
    lines = [json.dumps({"sentence": " ".join(WORDS[i % 7 :] + WORDS[: i % 5]), "n": i}) for i in range(60)]
    (root / "data.jsonl").write_text("\n".join(lines))
    (root / "empty.jsonl").write_text("")
    return root


@pytest.fixture(autouse=True, scope="module")
def fewer_and_plain_pictures():
    with pytest.MonkeyPatch.context() as patch:
        cheap_pictures(patch)
        yield
