"""`convert` with an alignment under FSDP 2 writes what one process writes; what FSDP cannot do is refused first."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import make_original, texts, tokenizer
from support.children import stage_one, tuning
from support.forks import together
from support.rounding import assert_moved_alike
from support.training import loud

from linearize.cli.main import main
from linearize.core.errors import ConfigError
from linearize.jobs.config import ConvertJob
from linearize.jobs.convert import open_conversion
from linearize.jobs.events import ignore
from linearize.jobs.stages import make_room

OPTIONS = {
    "text_column": "text", "holdout": 4, "batch_size": 2, "distill_steps": 2, "eval_every": 1, "distill_length": 16,
    "align_steps": 4, "align_blockwise": 0.5, "align_learning_rate": 1e-4, "device": "cpu",
}  # fmt: skip
MODELS = ("gpt2", "llama")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models, and what one process and two make of them."""
    root = tmp_path_factory.mktemp("aligned")
    texts(root, 40)

    for name in MODELS:
        loud(name, "AutoModelForCausalLM").save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)
    make_original(root / "bart", "bart", "AutoModelForSeq2SeqLM")
    # A process of two takes every other batch.
    stage_one.aligned(root, MODELS, "one", OPTIONS | {"gradient_accumulation": 2})
    together(stage_one.aligned, root, MODELS, "two", OPTIONS, environment=tuning.FSDP)
    return root


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_align_as_one(name, root):
    one, two = (load_file(root / f"{name} {count}" / "model.safetensors") for count in ("one", "two"))
    start = load_file(root / name / "model.safetensors")
    assert one.keys() == two.keys()
    moved = 0
    for key, tensor in one.items():
        assert_moved_alike(tensor, two[key], start.get(key, 0.0))
        moved += key in start and not torch.equal(tensor, start[key])
    records = [json.loads((root / f"{name} {count}" / "config.json").read_text()) for count in ("one", "two")]
    first, second = (record["linearize"]["provenance"]["alignment"] for record in records)
    assert moved > 10 and first["steps"] == second["steps"] == 4
    assert first["after"]["loss"] == pytest.approx(second["after"]["loss"], rel=1e-5)
    assert first["after"]["loss"] < first["before"]["loss"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "alignment: got FSDP version 1, expected 2"),
        ({**tuning.FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, "alignment: got offload_params=true under FSDP"),
        ({**tuning.FSDP, "ACCELERATE_MIXED_PRECISION": "fp16"}, "alignment: got fp16 under FSDP, expected bf16 or no"),
        *(
            ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": stage}, "alignment: got DeepSpeed")
            for stage in "23"
        ),
    ],
)
def test_what_cannot_shard_an_alignment_is_refused_before_anything_is_read(
    setting, message, monkeypatch, tmp_path, capsys
):
    for name, value in {"WORLD_SIZE": "2", **setting}.items():
        monkeypatch.setenv(name, value)
    assert main(["align", "./nowhere", "--output", str(tmp_path / "out")]) == 2 and not list(tmp_path.iterdir())
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_weights_that_fsdp_would_part_are_refused_before_stage_one(root, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", **tuning.FSDP}.items():
        monkeypatch.setenv(name, value)
    names = {"model": str(root / "bart"), "dataset": str(root / "texts.jsonl"), "output": str(root / "parted")}
    context = open_conversion(ConvertJob.of(**names, **OPTIONS), ignore)
    with pytest.raises(ConfigError, match=r"cannot shard BartForConditionalGeneration \(model\.shared\.weight and"):
        make_room(context)
    assert not list(root.glob("parted*"))
