"""A kernel from outside the package: registered, converted with, saved, loaded and decoded like any other."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from dataclasses import dataclass

import pytest
import torch
import transformers
from support.generation import GREEDY, generate_and_check
from support.tiny import converted, inputs_of, outputs

import linearize
import linearize.core.registry as registry
from linearize.attention.factory import count_parameters
from linearize.attention.interface import linear_attentions
from linearize.attention.mixer import Mixer
from linearize.core.errors import ConfigError, UnknownNameError
from linearize.core.registry import KernelInfo, kernel_info, make_config, option
from linearize.kernels.base import FeatureMap, Features, NoArguments, draw_normal, project


@dataclass(frozen=True)
class SharpConfig:
    """Arguments of `sharp`."""

    power: float = option(2.0, "exponent of the features", low=1.0, high=4.0)
    tied: bool = option(True, "whether queries and keys share one map")


class Sharp(FeatureMap):
    """relu(W x)^p."""

    def __init__(self, config, heads, head_dim):
        super().__init__(config, heads, head_dim)
        self.weight = self.add_parameter(head_dim, head_dim)

    def reset_parameters(self, generator):
        draw_normal(self.weight, generator)

    def forward(self, x, positions=None):
        return Features(project(x, self.weight).relu() ** self.config.power)


INFO = KernelInfo(
    name="sharp",
    summary="a power of a learned ReLU map",
    formula="phi(x) = relu(W x)^p",
    source="this test",
    url="https://arxiv.org/abs/0000.00000",
    config=SharpConfig,
    build=Sharp,
    feature_dim=lambda config, d: d,
    parameters=lambda config, d: d * d,
    parameters_formula="d^2",
    learnable=True,
    positive=True,
)


@pytest.fixture(autouse=True, scope="module")
def found():
    """Kernels are looked for once: not first within a test, which forgets what it registers."""
    linearize.kernel_infos()


@pytest.fixture
def sharp(monkeypatch):
    """The kernel, registered for one test."""
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))
    return linearize.register_kernel(INFO)


@pytest.mark.filterwarnings("ignore:kernel 'sharp' .*is not part of linearize")
@pytest.mark.parametrize("window", [None, 3])
def test_converts_saves_loads_and_decodes(sharp, window, tmp_path):
    model = converted("llama", "AutoModelForCausalLM", "sharp", kernel_args={"power": 3.0}, window=window)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    inputs = inputs_of(model)
    assert all(torch.equal(x, y) for x, y in zip(outputs(model, inputs), outputs(again, inputs), strict=True))
    generate_and_check(again, {"input_ids": inputs["input_ids"][1:]}, **GREEDY)


def test_saving_says_that_its_code_stays_behind(sharp, tmp_path):
    with pytest.warns(UserWarning, match="kernel 'sharp' .*is not part of linearize"):
        converted("bert", "AutoModel", "sharp").save_pretrained(tmp_path)


def test_an_entry_point_is_found(monkeypatch):
    monkeypatch.setattr(registry, "_KERNELS", {})
    monkeypatch.setattr(registry, "_discovered", False)

    class Entry:
        def load(self):
            return linearize.register_kernel(INFO)

    real = importlib.metadata.entry_points
    found = {"linearize.kernels": [Entry()]}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **kw: found.get(kw.get("group"), real(**kw)))
    assert kernel_info("sharp") is INFO


def test_a_broken_package_is_named(monkeypatch):
    monkeypatch.setattr(registry, "_discovered", False)
    broken = importlib.metadata.EntryPoint("sharp", "no_such_module", "linearize.kernels")
    real = importlib.metadata.entry_points
    found = {"linearize.kernels": [broken]}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **kw: found.get(kw.get("group"), real(**kw)))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"'no_such_module': got ModuleNotFoundError.*uninstall the package"):
            linearize.kernel_infos()


def test_a_name_is_taken_once(sharp):
    linearize.register_kernel(INFO)
    with pytest.raises(ConfigError, match="'sharp' is already registered by Sharp"):
        linearize.register_kernel(dataclasses.replace(INFO, build=type("Other", (Sharp,), {})))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": dict}, "expected a frozen dataclass"),
        ({"causal": False, "bidirectional": False}, "neither causally nor bidirectionally"),
        ({"build": None}, "got both build and preset, or neither"),
        ({"preset": lambda config, layers: []}, "got both build and preset, or neither"),
        (
            {"config": dataclass(frozen=True)(type("C", (), {"__annotations__": {"window": int}}))},
            "rename its own argument",
        ),
    ],
)
def test_contradicting_facts_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        linearize.register_kernel(dataclasses.replace(INFO, name="odd", **change))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"power": 9}, "expected a number from 1 to 4"),
        ({"power": "x"}, "got 'x', expected a number"),
        ({"power": float("nan")}, "expected a number from 1 to 4"),
        ({"tied": 1}, "got 1, expected true or false"),
    ],
)
def test_wrong_arguments_say_what_to_do(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_config(INFO, arguments)
    with pytest.raises(UnknownNameError, match=r"Did you mean 'power'\? Known: power, tied"):
        make_config(INFO, {"powr": 2.0})


def test_directions_and_head_sizes_are_held(sharp, monkeypatch):
    from linearize.attention.factory import build_mixer
    from linearize.attention.shape import HeadShape

    shape = HeadShape(4, 2, 8, 8, causal=True)
    for change, where, message in [
        ({"causal": False}, shape, "bidirectional only, but this attention is causal; choose another kernel"),
        ({"bidirectional": False}, dataclasses.replace(shape, causal=False), "causal only, but this attention is bid"),
        ({"max_head_dim": 4}, shape, "got head size 8, expected at most 4; choose another kernel"),
    ]:
        registry._KERNELS["sharp"] = dataclasses.replace(INFO, config=NoArguments, **change)
        with pytest.raises(ConfigError, match=message) as caught:
            build_mixer("sharp", {}, where)
        assert "\n" not in str(caught.value)


class Averaging(Mixer):
    """The mean of the values seen so far, times a learned number: no features, no blocks."""

    def __init__(self, info, config, shape):
        super().__init__(info, config, shape)
        self.gain = torch.nn.Parameter(torch.empty(shape.heads))

    def reset_parameters(self, generator):
        torch.nn.init.ones_(self.gain)

    def weights(self, q, k, *, scaling, key_padding_mask=None, rows=None):
        seen = torch.ones(k.shape[0], 1, q.shape[2], k.shape[2]).tril()
        seen = seen if rows is None else seen[:, :, rows]
        seen = seen if key_padding_mask is None else seen * key_padding_mask[:, None, None].float()
        return (seen / seen.sum(-1, keepdim=True).clamp(min=1)).expand(-1, self.shape.heads, -1, -1)

    def apply_output(self, mixed):
        return mixed * self.gain[:, None, None]

    def forward(self, call):
        q, v, mask, state = call.q, call.v, call.key_padding_mask, call.state
        real = torch.ones(v.shape[0], 1, v.shape[2], 1)
        real = real if mask is None else mask[:, None, :, None].float()
        total = torch.cat([v * real, real.expand(-1, v.shape[1], -1, -1)], dim=-1).cumsum(dim=2)
        total = total if state is None else total + state["total"]
        out = (total[..., :-1] / total[..., -1:].clamp(min=1)).repeat_interleave(q.shape[1] // v.shape[1], 1)
        return self.apply_output(out).to(v.dtype), {"total": total[:, :, -1:]} if call.needs_state else None


@pytest.mark.filterwarnings("ignore:kernel '.*is not part of linearize")
def test_a_mixer_of_ones_own(sharp, tmp_path):
    facts = {"feature_dim": None, "output_parameters": lambda config, v: 1, "parameters": lambda config, d: 0}
    info = dataclasses.replace(
        INFO, name="averaging", build=Averaging, config=NoArguments, bidirectional=False, **facts
    )
    linearize.register_kernel(info)
    model = converted("llama", "AutoModelForCausalLM", "averaging", layers={1: "sharp"})
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompt = {"input_ids": inputs_of(model)["input_ids"][1:]}
    generate_and_check(again, prompt, **GREEDY)
    # The weights of the last tokens alone, behind a cache of all keys.
    found = again.generate(**prompt, **GREEDY, output_attentions=True, return_dict_in_generate=True).attentions
    whole = again(**prompt, use_cache=False, output_attentions=True).attentions
    cached = again(**prompt, past_key_values=transformers.DynamicCache(), output_attentions=True).attentions
    assert found[1][0].shape[2:] == (1, prompt["input_ids"].shape[1] + 1)
    torch.testing.assert_close(cached, whole)
    layer = next(iter(linear_attentions(again).values()))
    assert sum(p.numel() for p in layer.parameters()) == count_parameters("averaging", {}, layer.shape)


def test_a_mixer_that_gives_no_single_rows_is_refused(sharp):
    class Whole(Averaging):
        def weights(self, q, k, *, scaling, key_padding_mask=None):
            return super().weights(q, k, scaling=scaling, key_padding_mask=key_padding_mask)

    linearize.register_kernel(dataclasses.replace(INFO, name="whole", build=Whole, config=NoArguments))
    with pytest.raises(ConfigError, match=r"kernel 'whole': Whole.weights takes no rows, expected an argument"):
        converted("llama", "AutoModelForCausalLM", "whole")
