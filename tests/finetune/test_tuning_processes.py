"""Stage two in several processes: what one process makes of their batches in turn, written once."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import make_original
from support.children import apart, tuning
from support.command_lines import make_models
from support.forks import together

from linearize.core.errors import ConfigError
from linearize.jobs.dry_run import dry_run
from linearize.jobs.evaluate import evaluate_checkpoint
from linearize.jobs.longdoc import run_longdoc
from linearize.jobs.task_config import EvaluateJob, LongdocJob, TuneJob
from linearize.training.processes import own_device

OPTIONS = {
    "task": "text-classification", "columns": "text", "max_length": 16, "epochs": 2, "eval_every": 2,
    "device": "cpu", "selection_rows": 4, "log_every": 1, "eval_batch_size": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = make_models(tmp_path_factory.mktemp("models"))
    for name in ("bert", "hedgehog"):
        # Dropout draws other numbers in other processes.
        config = root / name / "config.json"
        values = json.loads(config.read_text())
        config.write_text(json.dumps(values | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}))
    return root


def eval_losses(folder):
    log = [json.loads(entry) for entry in (folder / "log.jsonl").read_text().splitlines()]
    return [entry["eval_loss"] for entry in log if "eval_loss" in entry]


@pytest.mark.parametrize(
    ("count", "teacher", "lora"),
    [
        (2, True, None),
        pytest.param(2, False, None, marks=pytest.mark.slow),
        pytest.param(4, False, None, marks=pytest.mark.slow),
        pytest.param(4, True, "r=4,alpha=8", marks=pytest.mark.slow),
    ],
)
def test_several_processes_equal_one_that_takes_their_batches_in_turn(count, teacher, lora, models, tmp_path):
    more = OPTIONS | {"lora": lora}
    if teacher:
        # Far from its student, or the gradients are no more than rounding, which Adam makes large.
        far = OPTIONS | {"batch_size": 8, "learning_rate": 1e-2}
        tuning.main(str(models / "bert"), str(models / "data.jsonl"), str(tmp_path / "tuned"), far)
        more |= {"teacher": str(tmp_path / "tuned")}
    line = (str(models / "hedgehog"), str(models / "data.jsonl"))
    one, two = tmp_path / "one", tmp_path / "two"
    tuning.main(*line, str(one), {**more, "batch_size": 8 // count, "gradient_accumulation": count})
    together(tuning.main, *line, str(two), {**more, "batch_size": 8 // count}, count=count)
    first, second = (load_file(folder / "model.safetensors") for folder in (one, two))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-5)
    records = [json.loads((folder / "finetuning.json").read_text()) for folder in (one, two)]
    assert records[0]["metrics"] == pytest.approx(records[1]["metrics"], abs=1e-6)
    # Several processes repeat rows to fill the last batch.
    assert eval_losses(one) and eval_losses(one) == pytest.approx(eval_losses(two), abs=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", *(["tuned"] if teacher else []), "two"]


def test_two_processes_measure_a_language_model(models, tmp_path):
    """One of them counted its tokens once more than the other, so both ended in an error."""
    options = {name: value for name, value in OPTIONS.items() if name not in ("columns", "epochs")}
    options |= {"task": "causal-lm", "steps": 2, "batch_size": 4}
    make_original(tmp_path / "gpt2", "gpt2", "AutoModelForCausalLM", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    line, one, two = (str(tmp_path / "gpt2"), str(models / "data.jsonl")), tmp_path / "one", tmp_path / "two"
    tuning.main(*line, str(one), options | {"gradient_accumulation": 2})
    together(tuning.main, *line, str(two), options)
    assert eval_losses(one) and eval_losses(one) == pytest.approx(eval_losses(two), abs=1e-5)


@pytest.mark.parametrize("sharded", [False, True])
def test_machines_need_not_share_the_disk_of_the_output(sharded, models, tmp_path):
    """After the last step all but the first ended: "the weights of the state 'out.training/...' are missing"."""
    environment = tuning.FSDP if sharded else {}
    line = (str(tmp_path), str(models / "hedgehog"), str(models / "data.jsonl"), OPTIONS)
    together(apart.tune, *line, environment=environment)
    assert (tmp_path / "0" / "out" / "model.safetensors").exists()
    assert not list((tmp_path / "1").glob("*/*.safetensors"))


def test_each_process_has_a_device_of_its_own(monkeypatch):
    assert own_device("cpu") == "cpu"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("linearize.checkpoint.loading.check_device", lambda name: "cuda")
    assert own_device("auto") == "cuda:1" and own_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match=r"device: got 'cuda:0' for 2 processes, expected auto"):
        own_device("cuda:0")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert own_device("auto") == "cpu"


def test_what_runs_in_one_process_is_refused_in_several(monkeypatch, tmp_path):
    """Two ranks of `longdoc` fought for one folder; transformers' trainer wants an optimizer to measure under FSDP."""
    for name, value in {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}.items():
        monkeypatch.setenv(name, value)
    task = {"model": "./nowhere", "task": "text-classification", "dataset": "./nothing", "max_length": 8}
    with pytest.raises(ConfigError, match="longdoc: got several processes, expected one; start it without a launcher"):
        run_longdoc(LongdocJob.of(**task, output=str(tmp_path / "out")))
    with pytest.raises(ConfigError, match="evaluate: got several processes, expected one"):
        evaluate_checkpoint(EvaluateJob.of(**task))
    with pytest.raises(ConfigError, match="dry run: got several processes, expected one"):
        dry_run(TuneJob.of(**task, output=str(tmp_path / "out")))
    assert not list(tmp_path.iterdir())
