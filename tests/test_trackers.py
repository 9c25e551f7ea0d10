"""The TensorBoard log: what is written, and what is said where TensorBoard is not installed."""

import sys
import types
from pathlib import Path

import accelerate.tracking
import pytest
from accelerate.utils import LoggerType
from support.checkpoints import WORDS, make_original

from linearize.core.errors import ConfigError, UnknownNameError
from linearize.jobs.config import ConvertJob
from linearize.jobs.convert import convert_checkpoint
from linearize.jobs.finetune import finetune_checkpoint
from linearize.jobs.task_config import TuneJob
from linearize.training.stage_one.loop import StepReport
from linearize.training.trackers import reporter

REPORT = StepReport(3, 9, {"a": 1.0, "b": 3.0}, None, 0.1, 2.0)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [LoggerType.TENSORBOARD])


def test_scalars(tmp_path, monkeypatch, installed):
    seen, closed = {}, []

    class Writer:
        def __init__(self, folder):
            assert Path(folder) == tmp_path

        def add_scalar(self, name, value, global_step):
            seen[name] = (value, global_step)

        def flush(self):
            pass

        def close(self):
            closed.append(True)

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    with reporter("tensorboard", tmp_path) as write:
        write(REPORT)
    assert seen["stage_one/loss"] == (2.0, 3) and seen["stage_one/layer/b"] == (3.0, 3)
    assert "stage_one/held_out" not in seen and closed == [True]


def test_nothing_is_opened_where_no_step_is_done(tmp_path, installed):
    with reporter("tensorboard", tmp_path / "board", "alignment"):
        pass
    assert not (tmp_path / "board").exists()


def test_bad_input(tmp_path, monkeypatch):
    with pytest.raises(UnknownNameError, match="Did you mean 'tensorboard'"), reporter("tensorbord", tmp_path):
        pass
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [])
    with (
        pytest.raises(ConfigError, match=r"pip install \"linearize\[trackers\]"),
        reporter("none, tensorboard", tmp_path),
    ):
        pass
    with reporter("none", tmp_path) as write:
        write(REPORT)
    assert list(tmp_path.iterdir()) == []


class Recorded(accelerate.tracking.GeneralTracker):
    """A tracker that keeps its points."""

    requires_logging_directory, points, closed = True, [], []

    def __init__(self, run, folder):
        self.folder = Path(folder)

    def start(self):
        assert self.folder.name == "out.tensorboard"

    def log(self, values, step):
        self.points.append((step, values))

    def finish(self):
        self.closed.append(True)


def test_every_stage_reports_to_the_same_trackers_in_the_same_words(tmp_path, monkeypatch):
    """`convert` (stage one and alignment) and `finetune` into one folder, with one option."""
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", ["recorded"])
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "recorded", Recorded)
    monkeypatch.setattr(Recorded, "points", [])
    monkeypatch.setattr(Recorded, "closed", [])
    bert, rows = str(make_original(tmp_path / "bert", head="AutoModelForSequenceClassification")), tmp_path / "r.jsonl"
    rows.write_text("".join(f'{{"text": "{" ".join(WORDS[n % 9 :])} {n}", "label": {n % 2}}}\n' for n in range(48)))
    same = {"dataset": str(rows), "device": "cpu", "report_to": "recorded", "batch_size": 8, "overwrite": True}
    out = str(tmp_path / "out")
    convert_checkpoint(
        ConvertJob.of(model=bert, output=out, distill_steps=2, distill_length=16, holdout=8, align_steps=2, **same)
    )
    finetune_checkpoint(
        TuneJob.of(model=out, output=out, task="text-classification", columns="text", steps=2, log_every=1, **same)
    )
    stages = {name.split("/")[0] for _, values in Recorded.points for name in values}
    assert stages == {"stage_one", "alignment", "stage_two"} and len(Recorded.closed) == 3
    for stage in stages:
        own = [(step, values) for step, values in Recorded.points if any(name.startswith(stage) for name in values)]
        names = {name for _, values in own for name in values}
        assert {f"{stage}/{name}" for name in ("loss", "learning_rate", "held_out")} <= names
        assert max(step for step, _ in own) == 2
