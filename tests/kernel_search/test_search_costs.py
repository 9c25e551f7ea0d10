"""Costs are measured next to softmax, once, and remembered."""

from __future__ import annotations

import json

import pytest

import linearize
from linearize.attention.shape import HeadShape
from linearize.core.events import Started
from linearize.evaluation.bench.meter import Noise
from linearize.kernel_search import costs
from linearize.kernel_search.costs import Cost, measure_costs, suite_of
from linearize.modeling.plan import LayerPlan

SHAPE = HeadShape(4, 2, 8, 8, True)
GOOD = vars(Cost(0.5, 0.1, 0.2))


def suite(kernel, **arguments):
    return suite_of(LayerPlan("a", 0, kernel, SHAPE, arguments), "cpu", "float32")


SUITES = {"elu": suite("elu"), "t2r": suite("t2r", features=4)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(costs, "AIM", 0.01)
    monkeypatch.setattr(Noise, "too_noisy", False)
    return tmp_path / "linearize"


def test_costs_are_measured_once(folder):
    events = []
    first = measure_costs(SUITES, 32, events.append)
    assert set(first) == {"elu", "t2r"} and all(isinstance(event, Started) for event in events) and events
    assert all(cost.share == pytest.approx(cost.seconds / cost.softmax_seconds) for cost in first.values())
    assert all(cost.seconds > 0 for cost in first.values())
    events.clear()
    assert measure_costs(SUITES, 32, events.append) == first and events == []
    # Only unknown costs are measured: another length, other arguments.
    measure_costs(SUITES | {"more": suite("t2r", features=5)}, 32, events.append)
    assert [event.what for event in events] == ["timing softmax and 1 candidates at 32 tokens"]
    assert len(json.loads((folder / costs.FILE).read_text())) == 3
    events.clear()
    measure_costs(SUITES, 33, events.append)
    assert events
    assert [path.name for path in folder.iterdir()] == [costs.FILE]


def test_costs_of_a_noisy_machine_are_not_remembered(folder, monkeypatch):
    monkeypatch.setattr(Noise, "too_noisy", True)
    events = []
    for _ in range(2):
        assert all(cost.noisy for cost in measure_costs(SUITES, 16, events.append).values())
    assert len(events) == 2


@pytest.mark.parametrize(
    "damaged", [1, [], {"a": 1}, *({"a": GOOD | change} for change in ({"share": True}, {"seconds": "fast"}, {"b": 1}))]
)
def test_a_damaged_file_is_measured_over(damaged, folder):
    folder.mkdir(parents=True)
    for text in (json.dumps(damaged), "{", ""):
        (folder / costs.FILE).write_text(text)
        found = measure_costs(SUITES, 16, lambda event: None)
        assert set(found) == {"elu", "t2r"} and len(json.loads((folder / costs.FILE).read_text())) == 2


def test_the_public_name():
    assert linearize.search.__module__ == "linearize.kernel_search.loop"
