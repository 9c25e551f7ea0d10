"""Stage two under FSDP 2: two processes on a CPU, each with half of every weight, do what one process does."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import SENTENCE, make_original, make_text, tokenizer
from support.children import tuning
from support.forks import together
from support.rounding import assert_moved_alike
from support.tasks import write
from support.tiny import converted

import linearize
from linearize.cli.main import main
from linearize.core.errors import ConfigError
from linearize.jobs.events import ignore
from linearize.jobs.finetune import open_tuning
from linearize.jobs.task_config import TuneJob
from linearize.training.stage_two.save import resumed_from

OPTIONS = {
    "task": "causal-lm", "max_length": 16, "steps": 6, "eval_every": 3, "selection_rows": 4, "batch_size": 4,
    "eval_batch_size": 3, "learning_rate": 1e-3, "log_every": 1, "device": "cpu",
}  # fmt: skip
LORA = {"lora": "r=4,alpha=8", "keep_adapter": True}
CASES = {
    "in full": ("llama", {"steps": 3, "gradient_accumulation": 2, "gradient_checkpointing": True}),
    "tied": ("gpt2", {}),
    # The second process has no part of the weights of a single key head.
    "one key head": ("narrow", {}),
    # One epoch; in the next one, two processes read the rows in another order than one does.
    "labels": (
        "bert",
        {"task": "text-classification", "columns": "text", "steps": 4, "eval_every": 4, "selection_rows": 0},
    ),
    "low-rank": ("llama", LORA),
    "taught": ("llama", {"teacher": "tuned"}),
    "taught low-rank": ("llama", LORA | {"teacher": "tuned"}),
    "half": ("half", {}),
    "half low-rank": ("half", LORA),
    "autocast": ("llama", {"precision": "bf16"}),
}
# What is new in these are two things together, each of which another case has.
SLOW = "taught low-rank", "half low-rank"
FOUR = "in full", "low-rank"


@pytest.fixture(scope="module")
def root(tmp_path_factory, request):
    """Models without dropout, and what one process and several make of them in each case that is run."""
    names = {item.name for item in request.session.items}
    cases = {name: case for name, case in CASES.items() if any(run.endswith(f"-{name}]") for run in names)}
    root = tmp_path_factory.mktemp("sharded")
    words = SENTENCE.split()
    rows = [{"text": " ".join([*words[i % 9 :], words[i % 2]]), "label": i % 2} for i in range(40)]
    write(root / "rows.jsonl", rows)
    make_text(root / "llama", "llama", head="AutoModelForCausalLM")
    make_text(root / "narrow", "llama", head="AutoModelForCausalLM", config={"num_key_value_heads": 1})
    half = converted("llama", "AutoModelForCausalLM").to(torch.bfloat16)
    linearize.save(half, root / "half", processor=tokenizer())
    make_original(root / "soft", "llama", "AutoModelForCausalLM")
    make_original(root / "gpt2", "gpt2", "AutoModelForCausalLM", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    # With the usual small weights an untrained encoder gives all rows one label, and its gradients are rounding.
    config = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3}
    make_text(root / "bert", config=config)
    tuning.main(**job(root, "soft", "tuned", {"learning_rate": 1e-2}))
    for name, (model, options) in cases.items():
        # A process of two takes every other batch.
        more = {"gradient_accumulation": 2 * options.get("gradient_accumulation", 1)}
        tuning.main(**job(root, model, f"{name} one", options | more))
    jobs = [job(root, model, f"{name} 2", options) for name, (model, options) in cases.items()]
    together(tuning.sharded, jobs, environment=tuning.FSDP)
    jobs = [job(root, model, f"{name} whole", options) for name, (model, options) in cases.items()]
    together(tuning.whole, jobs, environment=tuning.FSDP)
    if fours := [name for name in FOUR if any(run.endswith(f"[4-{name}]") for run in names)]:
        jobs = [job(root, CASES[name][0], f"{name} 4", CASES[name][1] | {"batch_size": 2}) for name in fours]
        together(tuning.sharded, jobs, count=4, environment=tuning.FSDP)
    return root


def job(root, model, output, options):
    """A tuning as arguments of `tuning.main`."""
    options = {name: str(root / value) if name == "teacher" else value for name, value in options.items()}
    line = {"model": str(root / model), "dataset": str(root / "rows.jsonl"), "output": str(root / output)}
    return line | {"options": OPTIONS | options}


def vector(tensors, names):
    return torch.cat([tensors[name].flatten().double() for name in names])


@pytest.mark.parametrize(
    ("count", "case"),
    [pytest.param(2, x, marks=[pytest.mark.slow] * (x in SLOW)) for x in CASES]
    + [pytest.param(4, x, marks=pytest.mark.slow) for x in FOUR],
)
def test_processes_with_their_part_of_each_weight_equal_one(count, case, root):
    start, one, two = root / CASES[case][0], root / f"{case} one", root / f"{case} {count}"
    begin, *ends = (load_file(folder / "model.safetensors") for folder in (start, one, two))
    first, second = ({name: (x.shape, x.dtype) for name, x in end.items()} for end in ends)
    assert first == second
    # A new head is not where it started from; a body alone has its names.
    names = {name: name.removeprefix("bert.") for name in first if name.removeprefix("bert.") in begin}
    assert len(names) >= len(begin)
    assert_moved_alike(*(vector(end, names) for end in ends), vector(begin, names.values()))
    records = [json.loads((folder / "finetuning.json").read_text()) for folder in (one, two)]
    assert records[0]["best_step"] == records[1]["best_step"] == (OPTIONS | CASES[case][1])["steps"]
    assert records[0]["metrics"] == pytest.approx(records[1]["metrics"], rel=1e-4)
    assert sorted(p.relative_to(one) for p in one.rglob("*")) == sorted(p.relative_to(two) for p in two.rglob("*"))


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in CASES])
def test_weights_that_are_read_in_parts_equal_whole_ones_to_the_bit(case, root):
    parts, whole = (load_file(root / f"{case} {way}" / "model.safetensors") for way in ("2", "whole"))
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) and parts[name].dtype == whole[name].dtype for name in parts)
    ways = [json.loads((root / f"{case} {way}" / "finetuning.json").read_text()) for way in ("2", "whole")]
    assert ways[0]["metrics"] == ways[1]["metrics"] and ways[0]["selection"] == ways[1]["selection"]
    if "keep_adapter" in CASES[case][1]:
        files = (root / f"{case} {way}" / "adapter" / "adapter_model.safetensors" for way in ("2", "whole"))
        assert next(files).read_bytes() == next(files).read_bytes()


@pytest.mark.parametrize("more", [LORA, pytest.param({}, marks=pytest.mark.slow)], ids=["low rank", "in full"])
def test_a_resumed_run_ends_as_the_first_would_to_the_bit(more, root):
    options = OPTIONS | more | {"eval_every": 2}
    whole, parts = (job(root, "llama", f"{name} {len(more)}", options) for name in ("whole", "parts"))
    together(tuning.sharded, [whole], 3, parts, environment=tuning.FSDP)
    one, two = (load_file(root / f"{name} {len(more)}" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], two[name]) for name in one) and one.keys() == two.keys()
    assert not list(root.glob("*.training"))


def test_a_run_is_not_resumed_with_another_number_of_processes(root, monkeypatch):
    stopped = job(root, "llama", "stopped", {"eval_every": 2})
    with contextlib.suppress(KeyboardInterrupt):
        tuning.main(**stopped, on_event=tuning.interrupt(3))
    before = sorted(root.rglob("*"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in tuning.FSDP.items():
        monkeypatch.setenv(name, value)
    started = root / "stopped.training"
    with pytest.raises(ConfigError, match="resume: the run was started with processes='1', now it is '2 under FSDP'"):
        resumed_from(started, json.loads((started / "started.json").read_text()) | {"processes": "2 under FSDP"})
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"FSDP_VERSION": "1"}, "got FSDP version 1, expected 2; set fsdp_version: 2"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "got activation_checkpointing=true under FSDP"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "got offload_params=true under FSDP"),
        ({"FSDP_IGNORED_MODULES": ".*head"}, "got ignored_modules="),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "got fp16 under FSDP, expected bf16 or no"),
    ],
)
def test_settings_of_fsdp_are_refused_before_anything_is_read(setting, message, monkeypatch, tmp_path, capsys):
    for name, value in {"WORLD_SIZE": "2", **tuning.FSDP, **setting}.items():
        monkeypatch.setenv(name, value)
    words = ["finetune", "./nowhere", "--task", "cola", "--max-length", "8", "--output", str(tmp_path / "out")]
    assert main(words) == 2 and not list(tmp_path.iterdir())
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("verb", ["finetune", "convert"])
def test_deepspeed_is_refused_before_anything_is_read(verb, monkeypatch, tmp_path, capsys):
    for name, value in {"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"}.items():
        monkeypatch.setenv(name, value)
    words = [verb, "./nowhere", "--output", str(tmp_path / "out")]
    words += ["--task", "cola", "--max-length", "8"] if verb == "finetune" else []
    assert main(words) == 2 and not list(tmp_path.iterdir())
    error = capsys.readouterr().err
    assert "got DeepSpeed" in error and error.count("\n") == 1


def test_weights_that_would_be_trained_apart_are_refused(root, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", **tuning.FSDP}.items():
        monkeypatch.setenv(name, value)
    masked = job(root, "bert", "masked", {"task": "masked-lm"})
    with pytest.raises(ConfigError, match=r"cannot shard BertForMaskedLM \(cls.predictions.bias and .* are one weight"):
        open_tuning(TuneJob.of(**masked.pop("options"), **masked), ignore)
    assert not list(root.glob("masked*"))
