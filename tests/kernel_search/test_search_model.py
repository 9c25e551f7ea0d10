"""The search on tiny models: what it finds, that it repeats itself to the bit, and that it can be stopped anywhere."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
from support.training import Fixed, batches, loud

import linearize
from linearize.attention.interface import linear_attentions
from linearize.core import registry
from linearize.core.errors import ConfigError
from linearize.core.events import Started
from linearize.kernel_search import SearchConfig
from linearize.kernel_search.candidates import Candidates, lay_out
from linearize.kernel_search.costs import Cost
from linearize.kernel_search.loop import carrier_of, search
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_one.loop import distill

CANDIDATES = ("hedgehog", "hedgehog:tied=false", "flexformer_n", "t2r")


def config(**options):
    return SearchConfig(**{"candidates": CANDIDATES, "steps": 12, **options})


@pytest.mark.usefixtures("given_costs")
def test_a_search_from_end_to_end(model, data):
    before = {name: x.clone() for name, x in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    told, events = [], []
    result = linearize.search(model, data, config(), on_step=told.append, on_event=events.append)
    # The model is what it was.
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert set(before) == set(model.state_dict()) and not linear_attentions(model)
    assert [p.requires_grad for p in model.parameters()] == flags and all(p.grad is None for p in model.parameters())
    assert told == result.history and [one.step for one in told] == list(range(1, 13)) and result.steps == 12
    assert {one.candidates for one in told} == {8} and told[-1].loss < told[0].loss
    assert "trying plans on the whole model" in [event.what for event in events if isinstance(event, Started)]
    for layer in result.layers:
        assert set(layer.tried) == set(CANDIDATES) and all(0 < one["error"] < 1 for one in layer.tried.values())
        assert layer.error == layer.tried[layer.label]["error"] and layer.why and "\n" not in layer.why
    points = {point.name.split(",")[0]: point for point in result.points}
    plan = result.points[0]
    assert plan.name.startswith("the plan") and plan.share <= result.limit * (1 + 1e-9) == pytest.approx(0.2)
    assert points["softmax everywhere"].error == 0 and points["softmax everywhere"].share == pytest.approx(1)
    assert plan.error <= points.get("hedgehog everywhere", plan).error
    assert result.gain == pytest.approx(1 - plan.error / points.get("hedgehog everywhere", plan).error)
    assert result.to_dict()["error_below_reference"] == result.gain >= 0
    assert plan.seconds == pytest.approx(0.02 * plan.share)
    # Not carried out yet: this was a KeyError, and other kernels a RuntimeError of torch.
    for other in (model, linearize.convert(loud("bert"), "elu")):
        with pytest.raises(ConfigError, match=r"'encoder\.layer\.0\.attention\.self' of this .* carry the plan out"):
            result.load_kernels(other)
    # Carried out, it computes what was measured, and can learn further.
    model = linearize.apply(model, result.plan)
    result.load_kernels(model)
    assert [layer.kernel for layer in linear_attentions(model).values()] == [x.kernel for x in result.plan.converted]
    found = distill(model, data, DistillConfig(steps=1, learning_rate=0.0))
    for layer, one in zip(found.before.layers, result.layers, strict=True):
        assert layer.output_error == pytest.approx(one.error, rel=1e-4)


@pytest.mark.usefixtures("given_costs")
def test_the_error_of_the_plan_is_that_of_the_converted_model(model, data):
    from linearize.fidelity.measure import output_difference

    result = search(model, data, config(steps=3, candidates=("hedgehog", "t2r"), budget="cost=0.15"))
    assert [layer.label for layer in result.layers].count("t2r") == 1 and result.points[0].share == pytest.approx(0.15)
    converted = loud("bert")
    linearize.apply(converted, result.plan)
    result.load_kernels(converted)
    relative = output_difference(model, converted, data.holdout_batches())
    with torch.no_grad():
        states = torch.cat([model(**x).last_hidden_state[x["attention_mask"].bool()] for x in data.holdout_batches()])
    spread = (states.square().sum() / (states - states.mean(dim=0)).square().sum()).sqrt()
    assert result.points[0].hidden == pytest.approx(relative.relative_error * float(spread), rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "vit"])
@pytest.mark.usefixtures("given_costs")
def test_other_models_and_a_layer_that_stays_softmax(name):
    head = "AutoModelForCausalLM" if name == "llama" else "AutoModelForImageClassification"
    model = loud(name, head)
    result = search(model, Fixed(batches(model)), config(candidates=("hedgehog",), steps=4, budget="softmax=1"))
    labels = [layer.label for layer in result.layers]
    assert sorted(labels) == ["hedgehog", "softmax"] and result.figure == "logits, nats"
    kept = result.plan.layers[labels.index("softmax")]
    assert kept.kernel == "softmax" and kept.reason.startswith("kept softmax: ")
    plan, reference = result.points[0], next(p for p in result.points if p.name == "hedgehog everywhere")
    assert 0 < plan.error < reference.error and plan.share == pytest.approx((1 + 0.2) / 2)


def test_a_budget_that_lets_every_layer_stay_softmax_is_refused(model, data):
    """The plan of such a search converted nothing, and `convert` refused it."""
    with pytest.raises(ConfigError, match="got 2 layers to search, of which 2 may stay softmax"):
        search(model, data, config(budget="softmax=2"))


def stopped(report):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "stop_at", [2, pytest.param(4, marks=pytest.mark.slow), 9, pytest.param(12, marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("given_costs")
def test_resumed_equals_uninterrupted_to_the_bit(stop_at, model, data, tmp_path):
    whole = search(model, data, config())

    def stop(report):
        if report.step == stop_at:
            raise KeyboardInterrupt

    options = config(save_every=100, folder=str(tmp_path / "states"))
    with pytest.raises(KeyboardInterrupt):
        search(model, data, options, on_step=stop)
    again = search(model, data, dataclasses.replace(options, resume=True))
    assert again.plan == whole.plan and again.layers == whole.layers and again.points == whole.points
    for module, tensors in whole.kernels.items():
        assert all(torch.equal(x, again.kernels[module][name]) for name, x in tensors.items())
    # A finished one gives its result at once, whatever things cost by now.
    third = search(model, data, dataclasses.replace(options, resume=True), on_step=stopped)
    assert third.points == whole.points


def test_a_resumed_search_has_the_costs_that_it_began_with(given_costs, model, data, tmp_path):
    options = config(save_every=1, folder=str(tmp_path / "states"))
    whole = search(model, data, options)
    given_costs["hedgehog"] = 0.9
    assert search(model, data, dataclasses.replace(options, resume=True)).points == whole.points


@pytest.mark.usefixtures("given_costs")
def test_a_candidate_that_leaves_the_numbers_is_dropped(model, data, monkeypatch):
    from linearize.training.stage_one.observer import LayerLoss

    add = LayerLoss.add

    def spoiled(self, *args, **options):
        add(self, *args, **options)
        if self.name == "1/flexformer_n":
            self.total = float("nan")

    monkeypatch.setattr(LayerLoss, "add", spoiled)
    result = search(model, data, config())
    assert result.layers[1].tried["flexformer_n"]["diverged"] and result.layers[1].label != "flexformer_n"
    assert not result.layers[0].tried["flexformer_n"]["diverged"]


def test_layers_of_one_size_are_measured_together_and_alike_ones_once(model, data, monkeypatch):
    asked = []

    def measure(suites, length, on_event):
        asked.append(list(suites))
        return {name: Cost(0.1, 0.001, 0.01) for name in suites}

    monkeypatch.setattr("linearize.kernel_search.costs.measure_costs", measure)
    result = search(model, data, config(candidates=("t2r", "elu"), steps=1, budget="cost=0.5"))
    # hedgehog is only compared with.
    assert asked == [["t2r", "elu", "hedgehog"]]
    for layer in result.layers:
        assert {label: one["share"] for label, one in layer.tried.items()} == dict.fromkeys(asked[0], 0.1)


def test_a_kernel_that_brings_nothing_over_its_window_gives_way_to_the_window(given_costs, model, data):
    given_costs |= {"t2r:window=32": 0.4, "elu:window=32": 0.4, "none:window=32": 0.3}
    result = search(model, data, config(candidates=("t2r:window=32", "elu:window=32"), steps=1, budget="cost=0.5"))
    # All rows are shorter than the window, so that no kernel is ever used.
    assert [layer.kernel for layer in result.plan.converted] == ["none", "none"]
    assert {layer.hybrid.window for layer in result.plan.converted} == {32}


@pytest.mark.usefixtures("given_costs")
def test_what_no_plan_meets_names_the_nearest(model, data):
    with pytest.raises(
        ConfigError, match=r"no plan meets cost=0\.05.*cheapest \(t2r\) takes 0\.1 times softmax"
    ) as caught:
        search(model, data, config(budget="cost=0.05"))
    nearest = str(caught.value).partition("--budget ")[2].partition(",")[0]
    assert "\n" not in str(caught.value)
    assert search(model, data, config(budget=nearest, steps=2)).points[0].kernels == "2 x t2r"


def test_what_a_search_refuses(model, data):
    with pytest.raises(ConfigError, match="expected its softmax original"):
        search(linearize.convert(loud("bert")), data)
    with pytest.raises(ConfigError, match="got data of type list"):
        search(model, [])
    with pytest.raises(ConfigError, match="save_every and resume need a folder"):
        SearchConfig(resume=True)


def test_a_candidate_that_cannot_serve_the_model(monkeypatch, data):
    info = linearize.kernel_info("polaformer")
    monkeypatch.setitem(registry._KERNELS, "polaformer", dataclasses.replace(info, causal=False))
    model = loud("gpt2")
    with pytest.raises(ConfigError, match=r"candidates: 'polaformer' does not fit this model: .*bidirectional only"):
        search(model, Fixed(batches(model)), config(candidates=("polaformer", "hedgehog")))


@pytest.mark.usefixtures("given_costs")
def test_candidates_with_a_window_start_with_fitted_scales(monkeypatch):
    fitted = []

    def fit(layer, targets):
        fitted.append((layer.hybrid.window, targets.q.shape[2]))

    monkeypatch.setattr("linearize.training.stage_one.start.fit_scales", fit)
    model = loud("llama", "AutoModelForCausalLM")
    search(
        model, Fixed(batches(model)), config(candidates=("hedgehog", "hedgehog:window=4", "hedgehog:window=6"), steps=4)
    )
    # In each of two layers, once.
    assert sorted(window for window, _ in fitted) == [4, 4, 6, 6]


def test_a_candidate_starts_as_the_kernel_of_a_conversion_with_the_same_seed(model):
    drawn = []
    for seed in (0, 7):
        base = linearize.plan(model, "elu", seed=seed)
        layout = lay_out(model, base, ("performer", "hedgehog"), softmax=0)
        modules = Candidates(layout, carrier_of(model, base), torch.device("cpu")).modules
        converted = linearize.apply(copy.deepcopy(model), layout.plan(("performer",) * len(layout.layers), {}))
        layers = linear_attentions(converted.base_model)
        for number, layer in layout.layers.items():
            mine, theirs = modules[number, "performer"].state_dict(), layers[layer.module].state_dict()
            assert mine and all(torch.equal(x, theirs[name]) for name, x in mine.items())
            drawn.append(torch.cat([x.flatten() for x in mine.values()]))
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(drawn, 2))
