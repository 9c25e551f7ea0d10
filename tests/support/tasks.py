"""Words, a tokenizer of them, and rows as files."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = ["good", "bad", "film", "play", "song", "the", "a", "was", "is", "very", "not", "and"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def word_tokenizer(*, ends: bool = True):
    """A tokenizer of `WORDS`; with `ends` it adds special tokens around a text, as BERT's does and GPT's does not."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if ends:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def causal_folder(folder: Path, positions: int) -> Path:
    """Save a tiny untrained Llama that reads `WORDS`, made for so many positions."""
    from support.tiny import original

    sizes = {"vocab_size": 17, "max_position_embeddings": positions, "bos_token_id": 2, "eos_token_id": 3}
    original("llama", "AutoModelForCausalLM", **sizes).save_pretrained(folder)
    word_tokenizer(ends=False).save_pretrained(folder)
    return folder


def no_rows(name: str, **changes):
    """The data of a task without rows, for what depends on the task alone."""
    from linearize.training.stage_two.task_types.base import TaskData
    from linearize.training.stage_two.tasks import task

    chosen = task(name, **changes)
    return TaskData(chosen.type(chosen), [], [], "no rows")


def resampled_scores(data, predictions, labels, **options):
    """The task's score on units drawn with replacement, once per resample."""
    import numpy as np

    from linearize.training.stage_two.intervals import resampled_metrics

    drawn = resampled_metrics(data, predictions, labels, **options)
    return np.array([data.task.mean_of(metrics) for metrics in drawn])


def measured(model, data, folder: Path, batch_size: int = 7) -> dict[str, float]:
    """The task's metrics of a model, without an interval."""
    from linearize.training.stage_two.config import TuneConfig
    from linearize.training.stage_two.tuner import Tuner

    config = TuneConfig(eval_batch_size=batch_size)
    return Tuner(data.type.wrap(model), data, config, folder / "measured").measure()[0]


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def photos(tmp_path):
    from PIL import Image

    for split in ("train", "test"):
        for name, colour in (("red", (250, 10, 10)), ("blue", (10, 10, 250))):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(12):
                Image.new("RGB", (8, 8), tuple(max(0, c - number) for c in colour)).save(folder / f"{number}.png")
    return tmp_path / "photos"
