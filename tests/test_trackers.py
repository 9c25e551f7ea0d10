"""Stage one's TensorBoard log: what is written, and what is said where TensorBoard is not installed."""

import sys
import types
from pathlib import Path

import accelerate.tracking
import pytest
from accelerate.utils import LoggerType

from linearize.core.errors import ConfigError, UnknownNameError
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
    with pytest.raises(ConfigError, match="pip install tensorboard"), reporter("none, tensorboard", tmp_path):
        pass
    with reporter("none", tmp_path) as write:
        write(REPORT)
    assert list(tmp_path.iterdir()) == []
