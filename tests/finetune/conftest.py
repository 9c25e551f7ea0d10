"""Tiny models, tokenizers and data sets; nothing from the network."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.tasks import WORDS, word_tokenizer, write
from support.tiny import SMALLER, original
from support.training import loud


@pytest.fixture(scope="session")
def tokenizer():
    return word_tokenizer()


@pytest.fixture(scope="session")
def bert(tmp_path_factory, tokenizer) -> str:
    """Folder of a tiny untrained BERT without a head."""
    folder = tmp_path_factory.mktemp("bert")
    original("bert", vocab_size=len(tokenizer), max_position_embeddings=32, **SMALLER).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def loud_bert(tmp_path_factory, tokenizer) -> str:
    """Folder of such a BERT whose texts have embeddings far apart: rounding changes no rank."""
    folder = tmp_path_factory.mktemp("loud-bert")
    loud("bert", vocab_size=len(tokenizer), max_position_embeddings=32, **SMALLER).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory) -> str:
    """Folder of a tiny untrained GPT-2."""
    tokenizer = word_tokenizer(ends=False)
    folder = tmp_path_factory.mktemp("gpt2")
    sizes = {"vocab_size": len(tokenizer), "n_embd": 16, "n_head": 2, "n_positions": 32}
    original("gpt2", "AutoModelForCausalLM", **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def vit(tmp_path_factory) -> str:
    """Folder of a tiny untrained ViT."""
    from transformers import ViTImageProcessor

    folder = tmp_path_factory.mktemp("vit")
    original("vit", image_size=8, patch_size=4, **SMALLER).save_pretrained(folder)
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def glue(tmp_path_factory) -> Path:
    """A folder of data sets with GLUE's columns: `cola`, `mrpc` and `stsb`."""
    root = tmp_path_factory.mktemp("data")
    chance = random.Random(0)
    for split, count in (("train", 64), ("validation", 24)):
        cola, mrpc, stsb = [], [], []
        for number in range(count):
            first, second = (chance.choices(WORDS[2:], k=chance.randint(3, 8)) for _ in range(2))
            label = number % 2
            first[0] = "good" if label else "bad"
            text, other = " ".join(first), " ".join(second)
            cola.append({"sentence": text, "label": label, "idx": number})
            mrpc.append({"sentence1": text, "sentence2": other, "label": label, "idx": number})
            stsb.append({"sentence1": text, "sentence2": other, "label": 5.0 * label - chance.random() * label})
        for name, rows in (("cola", cola), ("mrpc", mrpc), ("stsb", stsb)):
            write(root / name / f"{split}.jsonl", rows)
    return root
