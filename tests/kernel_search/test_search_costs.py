"""Costs are measured next to softmax, once, and remembered."""

from __future__ import annotations

import json

import pytest

import linearize
from linearize.attention.shape import HeadShape
from linearize.core.events import Started
from linearize.kernel_search import costs
from linearize.kernel_search.costs import Setting, measure_costs
from linearize.modeling.plan import LayerPlan

SHAPE = HeadShape(4, 2, 8, 8, True)
PLANS = {"elu": LayerPlan("a", 0, "elu", SHAPE), "t2r": LayerPlan("a", 0, "t2r", SHAPE, {"features": 4})}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(costs, "AIM", 0.01)
    return tmp_path / "linearize"


def test_costs_are_measured_once(folder):
    events = []
    setting = Setting(32, "cpu", memory=False)
    first = measure_costs(SHAPE, PLANS, setting, events.append)
    assert set(first) == {"elu", "t2r"} and all(isinstance(event, Started) for event in events) and events
    assert all(cost.share == pytest.approx(cost.seconds / cost.softmax_seconds) for cost in first.values())
    assert all(cost.bytes is None and cost.seconds > 0 for cost in first.values())
    events.clear()
    assert measure_costs(SHAPE, PLANS, setting, events.append) == first and events == []
    # Only unknown costs are measured: another length, other arguments.
    measure_costs(SHAPE, PLANS | {"more": LayerPlan("a", 0, "t2r", SHAPE, {"features": 5})}, setting, events.append)
    assert [event.what for event in events] == ["timing softmax and 1 candidates at 32 tokens"]
    assert len(json.loads((folder / costs.FILE).read_text())) == 3
    events.clear()
    measure_costs(SHAPE, PLANS, Setting(33, "cpu", memory=False), events.append)
    assert events
    assert [path.name for path in folder.iterdir()] == [costs.FILE]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"a": {"share": -1}}'])
def test_a_damaged_file_is_measured_over(text, folder):
    folder.mkdir(parents=True)
    (folder / costs.FILE).write_text(text)
    found = measure_costs(SHAPE, PLANS, Setting(16, "cpu", memory=False), lambda event: None)
    assert set(found) == {"elu", "t2r"} and len(json.loads((folder / costs.FILE).read_text())) == 2


def test_memory_is_part_of_a_cost(folder, monkeypatch):
    from linearize.evaluation.bench.rows import Variant

    asked = []
    monkeypatch.setattr(costs, "memory_of", lambda suite, name, tokens: asked.append(name) or Variant(bytes=7))
    setting = Setting(16, "cpu", memory=False)
    measure_costs(SHAPE, PLANS, setting, lambda event: None)
    assert asked == []
    found = measure_costs(SHAPE, PLANS, Setting(16, "cpu"), lambda event: None)
    assert asked == ["softmax", "linear", "linear"] and {cost.bytes for cost in found.values()} == {7}
    assert measure_costs(SHAPE, PLANS, setting, lambda event: None) == found


def test_the_public_name():
    assert linearize.search.__module__ == "linearize.kernel_search.loop"
