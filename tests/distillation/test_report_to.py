"""Stage one's TensorBoard log: what is written, and what is said where TensorBoard is not installed."""

import sys
import types

import pytest

from linearize.distillation.loop import StepReport
from linearize.distillation.report_to import reporter
from linearize.errors import ConfigError, UnknownNameError

REPORT = StepReport(3, 9, {"a": 1.0, "b": 3.0}, None, 0.1, 2.0)


def test_scalars(tmp_path, monkeypatch):
    seen, closed = {}, []

    class Writer:
        def __init__(self, folder):
            assert folder == str(tmp_path)

        def add_scalar(self, name, value, step):
            seen[name] = (value, step)

        def close(self):
            closed.append(True)

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    with reporter("tensorboard", tmp_path) as write:
        write(REPORT)
    assert seen["stage_one/loss"] == (2.0, 3) and seen["stage_one/layer/b"] == (3.0, 3)
    assert "stage_one/held_out" not in seen and closed == [True]


def test_bad_input(tmp_path, monkeypatch):
    with pytest.raises(UnknownNameError, match="Did you mean 'tensorboard'"), reporter("tensorbord", tmp_path):
        pass
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"), reporter("tensorboard", tmp_path):
        pass
    with reporter("none", tmp_path) as write:
        write(REPORT)
    assert list(tmp_path.iterdir()) == []
