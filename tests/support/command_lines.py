"""Command lines on tiny models, one for each verb that writes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from support.checkpoints import make_original, make_text, texts
from support.forks import settle
from support.pictures import cheap_pictures

VERBS = ("convert", "distill", "align", "finetune", "init", "report", "compare", "run")
"""Verbs that write a folder; `embed` writes a file (tests/jobs/test_embed.py)."""


def make_models(root: Path) -> Path:
    """Make softmax and converted models, a data set, a config and a recipe."""
    texts(root, 40).rename(root / "data.jsonl")
    make_original(root / "bert")
    for kernel in ("hedgehog", "elu"):
        make_text(root / kernel, kernel=kernel)
    # A report draws each head.
    make_text(root / "small", config={"num_attention_heads": 2, "num_hidden_layers": 1})
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    (root / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 20, **sizes}))
    recipe = {
        "summary": "tiny",
        "flow": "pretrained",
        "kernels": ["softmax", "hedgehog"],
        "tasks": {"mine": {"task": "text-classification", "columns": ["text"]}},
        "model": {"name": str(root / "bert")},
        "data": str(root / "data.jsonl"),
        "rows": {"max_length": 16},
        "distil": {"steps": 3, "batch_size": 8, "holdout": 4},
        "finetune": {"learning_rate": 1e-3, "batch_size": 8, "epochs": 2, "eval_every": 2, "log_every": 1},
        "device": "cpu",
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


def line_of(verb: str, root: Path, out: Path, *more: object) -> list[str]:
    """Return the words of a command that writes to `out`; where there is --overwrite, with it."""
    data = ["--dataset", root / "data.jsonl", "--text-column", "text", "--device", "cpu"]
    stage_one = [*data, "--holdout", 8, "--batch-size", 4, "--distill-steps", 6]
    looks = [*data, "--inputs", 2, "--max-length", 16, "--lengths", "none"]
    words: dict[str, list[object]] = {
        "convert": ["convert", root / "bert", *stage_one, "--overwrite"],
        "distill": ["distill", root / "hedgehog", *stage_one, "--overwrite"],
        "align": ["align", root / "hedgehog", *data, "--holdout", 8, "--batch-size", 4, "--steps", 4, "--overwrite"],
        "finetune": [
            "finetune", root / "hedgehog", "--task", "text-classification", "--dataset", root / "data.jsonl",
            "--columns", "text", "--max-length", 16, "--batch-size", 8, "--epochs", 2, "--eval-every", 2,
            "--device", "cpu", "--overwrite",
        ],
        "init": ["init", root / "config.json", "--overwrite"],
        "report": ["report", root / "small", *looks, "--overwrite"],
        "compare": ["compare", root / "hedgehog", root / "elu", *looks, "--overwrite"],
        "demo": ["demo", "--steps", 1, "--tokens", 600],
        "run": ["run", root / "recipe.yaml"],
    }  # fmt: skip
    return [str(word) for word in [*words[verb], "--output", out, *more]]


def without(words: list[str], option: str) -> list[str]:
    """Return a line without an option that takes no value."""
    return [word for word in words if word != option]


def changed(words: list[str], option: str, value: object) -> list[str]:
    """Return a line with another value of an option."""
    place = words.index(option) + 1
    return [*words[:place], str(value), *words[place + 1 :]]


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Run a command line in this process; returns exit code, stdout and stderr."""
    from linearize.cli import main

    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_words(words: list[str], environment: dict[str, str], said: str) -> None:
    """Run a command line in a process of its own, its stderr in a file, and end with its exit code."""
    settle()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    from linearize.cli import main

    if words[0] == "report":
        cheap_pictures(pytest.MonkeyPatch())
    sys.exit(main(words))
