"""Every kernel and preset of the registry in whole models: converted, saved, loaded by Auto classes, decoded."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.generation import GREEDY, generate_and_check, prompts
from support.tiny import converted, inputs_of, outputs

from linearize.attention.factory import count_parameters
from linearize.attention.interface import linear_attentions
from linearize.core.registry import kernel_infos

WINDOWED = [info for info in kernel_infos() if info.windowed]
INFOS = [info for info in kernel_infos() if not info.needs_window]
MODELS = {"bert": "AutoModelForMaskedLM", "gpt2": "AutoModelForCausalLM", "llama": "AutoModelForCausalLM"}
CASES = [
    pytest.param(info, name, id=f"{info.name}-{name}")
    for info in INFOS
    for name in MODELS
    if (info.bidirectional if name == "bert" else info.causal)
]
WINDOW_CASES = [
    pytest.param(info, name, id=f"{info.name}-{name}")
    for info in WINDOWED
    for name in ("bert", "llama")
    if (info.bidirectional if name == "bert" else info.causal)
]


def reload(model, head, folder):
    model.save_pretrained(folder)
    return getattr(transformers, head).from_pretrained(folder).eval()


def assert_same(model, again):
    assert type(again) is type(model)
    mine, other = model.state_dict(), again.state_dict()
    assert mine.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in mine.items())
    inputs = inputs_of(model)
    for one, two in zip(outputs(model, inputs), outputs(again, inputs), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(("info", "name"), CASES)
@pytest.mark.sampled("values")
def test_reload_is_exact(info, name, tmp_path):
    model = converted(name, MODELS[name], info.name)
    again = reload(model, MODELS[name], tmp_path)
    assert_same(model, again)
    layers = list(linear_attentions(model).values())
    learned = sum(p.numel() for layer in layers for p in layer.parameters())
    arguments = model.config.linearize["layers"][0]["arguments"]
    assert learned == count_parameters(info.name, arguments, layers[0].shape, len(layers))


@pytest.mark.sampled("one")
@pytest.mark.parametrize(("info", "name"), WINDOW_CASES)
def test_reload_with_a_window_is_exact(info, name, tmp_path):
    model = converted(name, MODELS[name], info.name, window=4)
    again = reload(model, MODELS[name], tmp_path)
    assert_same(model, again)
    assert {layer.mixer.window for layer in linear_attentions(again).values()} == {4}


def assert_decodes(model):
    for use_cache in (True, False):
        generate_and_check(model, prompts(batch=2, tokens=11), **GREEDY, use_cache=use_cache)


@pytest.mark.sampled("one")
@pytest.mark.parametrize("info", [info for info in INFOS if info.causal and info.streamable], ids=lambda i: i.name)
def test_generation_with_the_cache_equals_without(info):
    # Blocks shorter than the text, where there are blocks.
    blocks = {"block": 5} if hasattr(info.config, "block") else {}
    assert_decodes(converted("llama", MODELS["llama"], info.name, kernel_args=blocks))


@pytest.mark.sampled("one")
@pytest.mark.parametrize("info", [info for info in WINDOWED if info.causal], ids=lambda i: i.name)
def test_generation_with_a_window(info):
    assert_decodes(converted("gpt2", MODELS["gpt2"], info.name, window=3))


@pytest.mark.sampled("one")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_mixed_plan_saves_loads_and_decodes(name, tmp_path):
    sizes = {"n_layer": 6} if name == "gpt2" else {"num_hidden_layers": 6}
    layers = {
        0: ("diag_softmax", {"block": 4}),
        1: ("luna", {"channels": 3, "shared_heads": True}),
        2: ("hedgehog", {"window": 3}),
        3: "macformer_log",
    }
    model = converted(name, MODELS[name], "norm_elu", layers=layers, keep_softmax=[5], config=sizes)
    kinds = [layer["kernel"] for layer in model.config.linearize["layers"]]
    assert kinds == ["diag_softmax", "luna", "hedgehog", "macformer_log", "norm_elu", "softmax"]
    again = reload(model, MODELS[name], tmp_path)
    assert_same(model, again)
    assert_decodes(again)


def test_using_a_model_does_not_change_it():
    """Running statistics are learned in training only, also in a model that is converted while in evaluation mode."""
    for info in INFOS:
        model = converted("bert", MODELS["bert"], info.name)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model(**inputs_of(model))
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), info.name
