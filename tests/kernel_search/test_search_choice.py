"""Choosing under limits, budgets and candidates: no model is run."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest

from linearize.core.errors import ConfigError
from linearize.kernel_search.candidates import parse_candidate, parse_candidates, windows_alone
from linearize.kernel_search.config import SearchConfig, parse_budget
from linearize.kernel_search.result import Point, SearchResult, reasons
from linearize.kernel_search.table import Entry, Option, Table, choose
from linearize.kernel_search.whole import WholeError, WholeModel


@pytest.mark.parametrize("softmax", [0, 1, 2])
def test_the_choice_is_the_best_of_all(softmax):
    """Against trying every choice."""
    draw = random.Random(softmax)
    for _ in range(20):
        layers = []
        for _ in range(4):
            options = [Option((f"k{i}",), draw.uniform(0.01, 0.1), draw.uniform(0, 1)) for i in range(4)]
            layers.append([*options, Option(("softmax",), 0.25, 0.0, 1)])
        limit = draw.uniform(0.05, 0.6)
        allowed = [
            (sum(o.error for o in one), sum(o.cost for o in one), tuple(o.labels[0] for o in one))
            for one in itertools.product(*layers)
            if sum(o.cost for o in one) <= limit and sum(o.softmax for o in one) <= softmax
        ]
        found = choose(layers, limit, softmax)
        assert found == (min(allowed)[2] if allowed else None)


def table():
    rows = {
        n: {"a": Entry(0.3, 0.1), "b": Entry(0.2, 0.2), "c": Entry(0.1, 0.3), "d": Entry(0.05, 0.4)} for n in (0, 1)
    }
    return Table(rows, {0: 0.5, 1: 0.5}, "c", ("a", "b", "d"))


def test_costs_and_errors_of_a_choice():
    found = table()
    assert found.cost(("a", "softmax")) == pytest.approx(0.5 * 0.3 + 0.5)
    found.weights = {0: 2.0, 1: 3.0}
    found.softmax = 1
    first, second = found.options()
    assert [option.labels for option in first] == [("a",), ("b",), ("d",), ("softmax",)]
    assert [option.error for option in first] == pytest.approx([2 * 0.1**2, 2 * 0.2**2, 2 * 0.4**2, 0.0])
    assert second[2].error == pytest.approx(3 * 0.4**2) and second[2].cost == pytest.approx(0.5 * 0.05)


def test_one_kernel_everywhere_within_the_limit_is_tried_too():
    found = table()
    found.limit = 0.3
    assert found.uniform() == [("a", "a"), ("b", "b"), ("d", "d")]
    found.rows[1]["a"].diverged = True
    found.limit = 0.25
    assert found.uniform() == [("b", "b"), ("d", "d")]


def test_why_a_layer_has_its_kernel():
    found = table()
    assert reasons(("a", "d"), found) == {
        0: "the closest of 3 candidates: error 0.1, next b with 0.2",
        1: "at 0.05 times softmax's time, error 0.4; a, the closest, has 0.1 at 0.3, more than the budget has for this "
        "layer",
    }
    assert reasons(("b", "b"), found)[0] == "error 0.2, a 0.1; the whole model is closest with b in every layer"
    found.weights = {0: 2.0}
    assert reasons(("softmax", "a"), found)[0] == (
        "kept softmax: with a, the closest, the layer's output would have an error of 0.1, which alone gives the whole "
        "model a squared error of 0.02"
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cost=0.25,softmax=1", {"cost": 0.25, "softmax": 1}),
        (["cost=.5", "softmax=2"], {"cost": 0.5, "softmax": 2}),
        ({"cost": 0.25, "softmax": 2}, {"cost": 0.25, "softmax": 2}),
        ("", {}),
    ],
)
def test_budgets(text, found):
    assert parse_budget(text) == found
    assert SearchConfig(budget=text).budget == found


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("cost", "got 'cost', expected cost=0.25"),
        ("cost=0", "got cost=0, expected"),
        ("cost=much", "got cost=much"),
        ("softmax=1.5", "got softmax=1.5"),
        ("price=1", "unknown budget 'price'"),
        ("cost=0.1,cost=0.2", "cost is given twice"),
    ],
)
def test_wrong_budgets(budget, words):
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")) as caught:
        SearchConfig(budget=budget)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["hedgehug", "elu"], "unknown kernel 'hedgehug'"),
        (["hedgehog:tied", "elu"], "in 'hedgehog:tied': got 'tied', expected NAME=VALUE"),
        (["hedgehog:tied=maybe", "elu"], "hedgehog, tied: got 'maybe'"),
        (["hedgehog:a=1:a=2", "elu"], "a is given twice"),
        (["elu", "elu"], "'elu' is named twice"),
        (["transnormer_t1", "elu"], "is a plan for all layers"),
        (["hedgehog"], "got one candidate"),
        ([], "got no candidate"),
    ],
)
def test_wrong_candidates(texts, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_candidates(texts, softmax=False)
    assert "\n" not in str(caught.value)


def test_one_candidate_is_enough_where_layers_may_stay_softmax():
    assert list(parse_candidates(["softmax", " hedgehog"], softmax=True)) == ["hedgehog"]
    assert parse_candidate("luna:channels=4:window=8") == ("luna", {"channels": "4", "window": "8"})


def test_a_window_is_a_candidate_without_its_kernel_too():
    texts = ["hedgehog:window=8:sinks=2", "t2r:window=8:sinks=2:exact_keys=3", "luna:window=4", "elu"]
    found = windows_alone(parse_candidates(texts, softmax=False))
    assert found == {
        "none:window=8:sinks=2": ("none", {"window": "8", "sinks": "2"}),
        "none:window=4": ("none", {"window": "4"}),
    }


def point(name, error, share):
    return Point(name, "", error, 0.0, 1.0, share, 1.0)


@pytest.mark.parametrize(
    ("points", "uniform"),
    [
        # 1e-9 nats were called a gain.
        ([point("the plan", 0.1, 0.2), point("elu everywhere", 0.1 + 1e-9, 0.2)], "elu everywhere"),
        ([point("the plan", 1e-9, 0.2), point("elu everywhere", 3e-9, 0.1)], "elu everywhere"),
        ([point("the plan", 0.1, 0.2), point("elu everywhere", 0.11, 0.2)], None),
        ([point("the plan", 0.1, 0.2), point("softmax everywhere", 0.0, 1.0)], None),
        ([point("the plan", 0.0, 1.0), point("softmax everywhere", 0.0, 0.2)], None),
        ([point("the plan, elu everywhere", 0.1, 0.2), point("softmax everywhere", 0.0, 1.0)], None),
    ],
)
def test_a_uniform_kernel_that_is_as_good_is_named(points, uniform):
    found = SearchResult.uniform.fget(SimpleNamespace(points=tuple(points), limit=0.25))
    assert (None if found is None else found.name) == uniform


def test_a_reference_meets_the_budget_that_it_is_shown_with():
    """0.0667 of softmax's time, as a table has it, was refused where the reference takes 0.06674."""
    found = Table({n: {"elu": Entry(0.06674)} for n in (0, 1)}, {0: 0.5, 1: 0.5}, "elu", ("elu",))
    found.set_limit(SearchConfig(budget="cost=0.0667"))
    assert found.limit == pytest.approx(0.06674)
    with pytest.raises(ConfigError, match=r"no plan meets cost=0\.06"):
        found.set_limit(SearchConfig(budget="cost=0.06"))


def test_the_reason_of_a_layer_counts_only_candidates():
    """The reference, not a candidate, was its next one: "the closest ...: error 0.3, next hedgehog with 0.1"."""
    row = {"elu": Entry(0.1, 0.3), "t2r": Entry(0.2, 0.4), "hedgehog": Entry(0.2, 0.1)}
    table = Table({0: row}, {0: 1.0}, "hedgehog", ("elu", "t2r"))
    assert reasons(("elu",), table) == {0: "the closest of 2 candidates: error 0.3, next t2r with 0.4"}


def test_a_layer_is_weighed_by_what_its_error_does_to_the_whole_model():
    """The whole model's squared error with this layer alone replaced, over the layer's own; then the best is tried."""

    class Known(WholeModel):
        def __init__(self):
            self.tried = []

        def errors(self, choices):
            self.tried += choices
            alone = {("a", "softmax"): 0.5, ("softmax", "b"): 0.4}
            return [WholeError(alone.get(choice, 0.3 if choice == ("d", "d") else 0.6), 1.0) for choice in choices]

    found, whole = table(), Known()
    assert whole.decide(found, ("a", "b"), ("b", "a"), None) == ("d", "d")
    assert found.weights == {0: pytest.approx(0.5**2 / 0.1**2), 1: pytest.approx(0.4**2 / 0.2**2)}
    assert whole.tried[:2] == [("a", "softmax"), ("softmax", "b")]
    assert {("b", "a"), ("a", "a"), ("b", "b"), ("d", "d"), found.best()} <= set(whole.tried)
