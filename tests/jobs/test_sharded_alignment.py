"""`convert` with an alignment under FSDP 2 writes what one process writes; what FSDP cannot do is refused first."""

from __future__ import annotations

import json
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import make_original, texts, tokenizer
from support.children import stage_one, tuning
from support.forks import together
from support.rounding import assert_moved_alike
from support.training import loud, loud_converted

import linearize
from linearize.cli.main import main
from linearize.core.errors import ConfigError
from linearize.jobs.config import ConvertJob
from linearize.jobs.convert import open_conversion
from linearize.jobs.events import ignore
from linearize.jobs.stages import make_room

OPTIONS = {"text_column": "text", "holdout": 4, "batch_size": 2, "eval_every": 1, "device": "cpu"}
CONVERT = {
    "distill_steps": 2, "distill_length": 16, "align_steps": 4, "align_blockwise": 0.5, "align_learning_rate": 1e-4,
}  # fmt: skip
ALIGN = {"length": 16, "steps": 4, "blockwise": 0.5, "learning_rate": 1e-4}
CASES = {
    "tied": ("convert", "gpt2", CONVERT),
    "after stage one": ("convert", "llama", CONVERT),
    "kernels": ("align", "linear", ALIGN | {"train": "kernels"}),
    "attention": ("align", "linear", ALIGN | {"train": "attention"}),
    "low rank": ("align", "linear", ALIGN | {"train": "lora", "teacher": "llama"}),
    "blocks": ("align", "linear", ALIGN | {"teacher": "llama"}),
    "half": ("align", "half", ALIGN),
    "fp16": ("align", "sixteen", ALIGN),
    "worse": ("align", "half", ALIGN | {"learning_rate": 1.0, "kernel_learning_rate": 1.0, "steps": 2}),
}
ALIKE = [case for case, (_, model, _) in CASES.items() if model not in ("half", "sixteen")]
"""Of weights in half precision, the last bit depends on the order of sums."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models, and what one process and two make of them; two once with weights in their files, once with whole ones."""
    root = tmp_path_factory.mktemp("aligned")
    texts(root, 40)
    for name in ("gpt2", "llama"):
        loud(name, "AutoModelForCausalLM").save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)
    make_original(root / "bart", "bart", "AutoModelForSeq2SeqLM")
    # A weights file for almost every weight.
    model = loud_converted("llama", "AutoModelForCausalLM")
    linearize.save(model, root / "linear", processor=tokenizer(), max_shard_size=4000)
    for name, dtype in {"half": torch.bfloat16, "sixteen": torch.float16}.items():
        linearize.save(model.to(dtype), root / name, processor=tokenizer())
    for case in ALIKE:
        # A process of two takes every other batch.
        stage_one.job(root, *jobs("one", {"gradient_accumulation": 2})[case])
    for way in ("parts", "whole"):
        together(stage_one.aligned, root, [*jobs(way).values()], way == "whole", environment=tuning.FSDP)
    return root


def jobs(way, more=MappingProxyType({})):
    """Each case as arguments of `stage_one.job`."""
    return {case: (verb, model, f"{case} {way}", OPTIONS | own | more) for case, (verb, model, own) in CASES.items()}


def read(folder):
    """The weights in a folder, and what its record says about the alignment."""
    weights = {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
    provenance = json.loads((folder / "config.json").read_text()).get("linearize", {}).get("provenance") or {}
    return weights, provenance.get("alignment")


@pytest.mark.parametrize("case", ALIKE)
def test_two_processes_align_as_one(case, root):
    (one, first), (two, second) = (read(root / f"{case} {way}") for way in ("one", "parts"))
    start, _ = read(root / CASES[case][1])
    assert one.keys() == two.keys()
    moved = 0
    for key, tensor in one.items():
        if key in start and torch.equal(tensor, start[key]):
            assert torch.equal(tensor, two[key])
            continue
        assert_moved_alike(tensor, two[key], start.get(key, 0.0))
        moved += 1
    assert moved > 1 and first["steps"] == second["steps"] == 4
    assert first["after"]["loss"] == pytest.approx(second["after"]["loss"], rel=1e-5)
    assert first["after"]["loss"] < first["before"]["loss"]


@pytest.mark.parametrize("case", CASES)
def test_weights_that_are_read_in_parts_are_aligned_as_whole_ones_to_the_bit(case, root):
    (parts, first), (whole, second) = (read(root / f"{case} {way}") for way in ("parts", "whole"))
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) and parts[name].dtype == whole[name].dtype for name in parts)
    assert first["before"] == second["before"] and first["after"] == second["after"]
    assert not [path for path in root.iterdir() if path.name.startswith(".") or path.suffix == ".align"]


def test_an_alignment_that_does_not_help_leaves_the_weights_as_they_were(root):
    (start, _), (end, record) = read(root / "half"), read(root / "worse parts")
    assert record["best_step"] == 0 and record["after"] == record["before"]
    assert start.keys() == end.keys() and all(torch.equal(end[name], start[name]) for name in start)


@pytest.mark.parametrize("case", ["blocks", pytest.param("low rank", marks=pytest.mark.slow)])
def test_a_resumed_alignment_ends_as_the_first_would_to_the_bit(case, root):
    resumed = jobs("resumed", {"save_every": 1})[case]
    together(stage_one.aligned, root, [resumed], False, 3, environment=tuning.FSDP)
    (whole, _), (parts, _) = (read(root / f"{case} {way}") for way in ("parts", "resumed"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


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
    context = open_conversion(ConvertJob.of(**names, **OPTIONS, **CONVERT), ignore)
    with pytest.raises(ConfigError, match=r"cannot shard BartForConditionalGeneration \(model\.shared\.weight and"):
        make_room(context)
    assert not list(root.glob("parted*"))
