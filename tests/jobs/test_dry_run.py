"""`--dry-run`: everything is checked, the bill is that of the job, and nothing is written."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from support.checkpoints import make_original, make_text, texts
from support.command_lines import run

from linearize.core.errors import CheckpointError, ConfigError
from linearize.fidelity.heads import POINTS, keep_heads
from linearize.jobs import convert
from linearize.jobs import dry_run as module
from linearize.jobs.config import DistillJob
from linearize.jobs.dry_run import Bill, StageBill, _step_and_evaluation, dry_run, duration
from linearize.training.alignment.config import AlignConfig
from linearize.training.stage_one import observer
from linearize.training.stage_one.config import DistillConfig

DATA = "--dataset texts.jsonl --text-column text --holdout 8 --batch-size 4 --device cpu"
TASK = "--task text-classification --dataset texts.jsonl --columns text --max-length 16 --batch-size 8 --device cpu"
CASES = {
    # Verb -> its line, and of each stage: name, steps, rows per step, evaluations.
    "convert": (f"convert bert {DATA} --distill-steps 50 --eval-every 20 --align-steps 8 --align-eval-every 3 "
                "--gradient-accumulation 2 --output made",
                [("stage one", 50, 8, 3), ("alignment, blockwise", 2, 8, 1), ("alignment, end to end", 6, 8, 2)]),
    "distill": (f"distill linear {DATA} --distill-steps 7 --save-every 2 --output made", [("stage one", 7, 4, 1)]),
    "align": (f"align linear {DATA} --teacher bert --steps 4 --blockwise 0 --output made",
              [("alignment, end to end", 4, 4, 1)]),
    # 77 rows to train on: 10 batches, 5 steps per epoch; an evaluation each, and the last one.
    "finetune": (f"finetune linear {TASK} --epochs 2 --gradient-accumulation 2 --output made",
                 [("stage two", 10, 16, 3)]),
    "teacher": (f"finetune linear {TASK} --new-head --steps 9 --eval-every 3 --lora r=2 --output made",
                [("stage two", 9, 8, 4)]),
    "no epochs": (f"finetune linear {TASK} --epochs 0 --output made", [("stage two", 0, 8, 1)]),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("bill")
    texts(root, 96)
    make_original(root / "bert")
    make_text(root / "linear")
    return root


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def everything(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", CASES)
def test_the_bill_is_that_of_the_job(case, here, capsys):
    before = everything(here)
    words, stages = CASES[case]
    code, out, err = run(capsys, *words.split(), "--dry-run", "--json")
    assert code == 0, err
    bill = json.loads(out)["bill"]
    assert [(s["stage"], s["steps"], s["rows"], s["evaluations"]) for s in bill["stages"]] == stages
    for stage in bill["stages"]:
        assert 1 <= stage["timed"] <= 3 and stage["seconds_per_step"] > 0
        assert stage["seconds"] >= (stage["steps"] - stage["timed"]) * stage["seconds_per_step"]
    assert bill["seconds"] == pytest.approx(sum(stage["seconds"] for stage in bill["stages"]))
    assert bill["fits"] and bill["problems"] == [] and bill["output"] == "made"
    assert bill["length"] == (16 if "finetune" in words else 64) and "texts.jsonl" in bill["data"]
    weights = (here / "linear" / "model.safetensors").stat().st_size
    assert weights < bill["disk"] < bill["disk_there"]
    if bill["memory"] is not None:
        assert 0 < bill["memory"] < bill["memory_there"]
    assert "It fits. Nothing was written." in err and all(f"Time, {stage[0]}: " in err for stage in stages)
    assert everything(here) == before


def test_what_the_job_would_refuse_is_refused(here, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("mine")
    for line, words in (
        (f"distill linear {DATA} --output {tmp_path / 'there'}", "is not empty"),
        (f"align linear {DATA} --dataset nowhere.jsonl", "nowhere.jsonl"),
        (f"finetune linear {TASK} --columns nothing", "nothing"),
        (f"finetune linear {TASK} --output {tmp_path / 'there'}", "is not empty"),
        (f"convert bert {DATA} --push-to-hub alice", "USER/NAME"),
    ):
        code, _, err = run(capsys, *line.split(), "--dry-run")
        assert code == 2 and words in err and err.count("\n") == 1, err
    states = tmp_path / "run.stage1" / "step-2"
    states.mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds an interrupted run"):
        dry_run(DistillJob.of(model="linear", dataset="texts.jsonl", output=str(tmp_path / "run"), save_every=1))
    with pytest.raises(CheckpointError, match="is not empty"):
        dry_run(DistillJob.of(model="linear", dataset="texts.jsonl", output=str(tmp_path / "there")))


def test_what_the_job_would_say_is_said(here, capsys):
    """What is done to a model for longer rows was done in silence."""
    code, out, _ = run(capsys, *f"convert bert {DATA} --max-length 96 --distill-steps 2 --dry-run".split())
    assert code == 0 and "Inputs: learned positions, tile: 64 trained rows become 96" in out


def test_what_does_not_fit_is_said(here, capsys, monkeypatch):
    line = CASES["distill"][0].split()
    monkeypatch.setattr(module, "free_disk", lambda target: 1000)
    code, _, err = run(capsys, *line, "--dry-run", "--json")
    assert code == 2 and "It does not fit: disk: " in err and "0 MiB free" in err

    def full(self, batches, step):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(observer.KernelTrainer, "step", full)
    code, out, _ = run(capsys, *line, "--dry-run", "--json")
    bill = json.loads(out)["bill"]
    assert code == 2 and not bill["fits"] and bill["stages"] == []
    assert "memory ran out in stage one; lower --batch-size" in bill["problems"][0]
    monkeypatch.setattr(observer.KernelTrainer, "step", lambda self, batches, step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(capsys, *line, "--dry-run")


def test_times_of_steps_and_of_the_evaluation_after_the_last():
    assert _step_and_evaluation([1.0, 3.0, 10.0]) == (2.0, 5.0)
    assert _step_and_evaluation([1.0, 3.0]) == (2.0, 0.0)
    assert _step_and_evaluation([4.0]) == (4.0, 0.0)
    assert _step_and_evaluation([1.0, 3.0, 4.0]) == (2.0, 0.0)


def test_a_bill_in_words():
    stage = StageBill("stage one", 1000, 32, 2.5, 3, 10, 2600.0)
    bill = Bill("out", "a file", 256, (stage, stage), "cpu", 3 * 2**30, 2**30, 2**20, 2**31)
    assert bill.seconds == 5200 and bill.problems == ["memory: 3.0 GiB needed, 1.0 GiB available"]
    lines = bill.lines()
    assert lines[0] == "Data: a file; rows of up to 256 tokens"
    assert lines[1] == "Time, stage one: 1,000 steps of 32 rows at 2.5 s, evaluated 10 times: 43 min"
    assert "Time, total: 87 min" in lines and lines[-1].startswith("It does not fit: memory")
    assert (duration(119), duration(7300)) == ("119 s", "2 h 02 min")


def test_choosing_windows_and_heads_is_part_of_the_bill(tmp_path, monkeypatch, capsys):
    """They took minutes that the bill left out; a dry run chooses the heads in one step, a quarter of the job's."""
    monkeypatch.chdir(tmp_path)
    texts(tmp_path, 60)
    make_original(tmp_path / "llama", "llama", "AutoModelForCausalLM")
    points = []

    def keep(*args, **options):
        points.append(options["points"])
        return keep_heads(*args, **options)

    monkeypatch.setattr(convert, "keep_heads", keep)
    line = "convert llama --window auto:4 --keep-softmax-heads 2 --dataset texts.jsonl --distill-length 24 --holdout 8"
    code, out, err = run(
        capsys, *line.split(), *["--distill-steps", "2", "--align-steps", "0", "--device", "cpu", "--json"], "--dry-run"
    )
    assert code == 0, err
    stages = {stage["stage"]: stage["seconds"] for stage in json.loads(out)["bill"]["stages"]}
    assert list(stages) == ["choosing the windows", "choosing the heads", "stage one"] and min(stages.values()) > 0
    assert points == [1] and module.CHOICES["keep_softmax_heads"][1] == POINTS == 4
    assert "Time, choosing the heads: " in err


def test_all_held_out_rows_are_billed_but_one_batch_is_measured(monkeypatch):
    """On rows of 4,096 tokens a dry run measured all of them twice, for a quarter of an hour."""
    held = [{"input_ids": torch.full((2, 4), number)} for number in range(3)]
    source = SimpleNamespace(holdout_batches=lambda: held, options={"batch_size": 2})
    context = SimpleNamespace(source=source, loaded=SimpleNamespace(model=torch.nn.Identity()), teacher=None)

    def run(model, rows, config, **given):
        assert len(rows.holdout_batches()) == 1 and config.steps == 3
        return SimpleNamespace(history=[SimpleNamespace(seconds=seconds) for seconds in (1.0, 3.0, 10.0)])

    for name in ("distill", "align"):
        monkeypatch.setattr(module, name, run)
    monkeypatch.setattr(module, "_measurement", lambda context, held: 4.0)
    # Steps of 2 s; evaluations of 5 s a batch, after every 4 of the 10 steps and after the last; two more batches are
    # measured before and after, 4 s each in stage one, as long as an evaluation in the alignment, and evaluated twice.
    (stage,) = module._trained(context, DistillConfig(steps=10, eval_every=4))
    assert (stage.evaluation, stage.evaluations, stage.timed) == (15.0, 3, 3)
    assert stage.seconds == pytest.approx(7 * 2 + 2 * 15 + 2 * 2 * (4 + 5), abs=0.5)
    (stage,) = module._trained(context, AlignConfig(steps=10, eval_every=4, blockwise=0.0))
    assert stage.seconds == pytest.approx(7 * 2 + 2 * 15 + 2 * 2 * (5 + 5), abs=0.5)
    assert len(source.holdout_batches()) == 3
