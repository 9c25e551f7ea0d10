"""Tiny processors made in place, files written for the test, and no way to the network."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

WORDS = [f"w{number}" for number in range(400)]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    # Slept at each end of a shuffled parquet stream, to be gentle with threads that a test does not have.
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)


def _tokenizer(special: bool) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if not special:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="[UNK]")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)


@pytest.fixture(scope="session")
def bert_tokenizer() -> Any:
    """Word w<i> is token 5 + i; [CLS] 2, [SEP] 3, [PAD] 0."""
    return _tokenizer(special=True)


@pytest.fixture(scope="session")
def gpt_tokenizer() -> Any:
    """Word w<i> is token 5 + i; <eos> 4, and no padding token."""
    return _tokenizer(special=False)


@pytest.fixture(scope="session")
def image_processor() -> Any:
    from transformers import ViTImageProcessor

    return ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.0] * 3, image_std=[1.0] * 3)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    """Write a text file, gzip'd if its name says so, and return its path."""

    def write_file(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return str(path)

    return write_file


@pytest.fixture
def rows(write: Callable[[str, str], str]) -> Callable[[str, Sequence[dict[str, Any]]], str]:
    """Write rows as JSON lines and return the path."""
    return lambda name, items: write(name, "".join(json.dumps(item) + "\n" for item in items))


def colour_image(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (6, 4)) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def draw() -> Callable[..., None]:
    """Write an image of one colour."""
    return colour_image
