"""Tiny recipes: the same flows as the real ones, in seconds."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest
import yaml
from support.tasks import WORDS
from support.tiny import SMALLER, original


@pytest.fixture(scope="session")
def sets(tmp_path_factory) -> Path:
    """A folder of data sets: `cola` and `mrpc`."""
    root = tmp_path_factory.mktemp("sets")
    chance = random.Random(0)
    for split, count in (("train", 48), ("validation", 16)):
        rows: dict[str, list[dict]] = {"cola": [], "mrpc": []}
        for number in range(count):
            text, other = (" ".join(chance.choices(WORDS[2:], k=chance.randint(3, 8))) for _ in range(2))
            label = number % 2
            text = f"{'good' if label else 'bad'} {text}"
            rows["cola"].append({"sentence": text, "label": label})
            rows["mrpc"].append({"sentence1": text, "sentence2": other, "label": label})
        for name, found in rows.items():
            (root / name).mkdir(exist_ok=True)
            text = "".join(json.dumps(row) + "\n" for row in found)
            (root / name / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    """Folder of a tiny untrained BERT."""
    from linearize.jobs.synthetic.tokenizers import fixed_tokenizer

    tokenizer = fixed_tokenizer(WORDS)
    folder = tmp_path_factory.mktemp("bert")
    original("bert", vocab_size=len(tokenizer), max_position_embeddings=32, **SMALLER).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_values(checkpoint, sets) -> dict:
    """A recipe of the flow `finetuned`, as plain data; not to be changed."""
    tune = {"learning_rate": 5e-3, "batch_size": 16, "epochs": 2, "eval_every": 2, "log_every": 1}
    return {
        "summary": "tiny",
        "flow": "finetuned",
        "kernels": ["softmax", "hedgehog", {"name": "t2r", "label": "t2r as it is", "distil": False}],
        "tasks": {"cola": {}, "mrpc": {"score": ["f1"]}},
        "model": {"name": checkpoint},
        "data": str(sets),
        "rows": {"max_length": 20},
        "teacher": tune,
        "distil": {"steps": 4, "eval_every": 2, "batch_size": 8, "holdout": 8},
        "finetune": {**tune, "epochs": 1},
        "figures": {"softmax": {"cola": 58.8, "mrpc": 90.2}, "another": {"cola": 1.0}},
        "device": "cpu",
    }


@pytest.fixture
def tiny(tiny_values) -> dict:
    """That recipe, to be changed."""
    return copy.deepcopy(tiny_values)


@pytest.fixture
def write(tmp_path):
    """Write a recipe into a file and return its name."""

    def written(values: dict, name: str = "tiny.yaml") -> str:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return str(path)

    return written
