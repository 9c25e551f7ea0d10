"""What people do with a model as an object: pickle it, trace it, lay it out without memory."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import timm
import torch
import transformers
from accelerate import infer_auto_device_map, init_empty_weights
from support.tiny import converted, inputs_of, outputs, stir

import linearize
from linearize.modeling import config as config_module
from linearize.modeling import model as model_module


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_pickled_and_back(name):
    model = converted(name)
    inputs = inputs_of(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is type(model) and type(loaded.config) is type(model.config)
    copied = copy.deepcopy(model)
    for other in (loaded, copied):
        assert torch.equal(outputs(other, inputs)[0], outputs(model, inputs)[0])
    # Copies have weights of their own, and nothing of what was worked out for the old ones.
    with torch.no_grad():
        next(iter(linearize.modeling.model.linear_attentions(copied).values())).mixer.keys.weight.add_(1.0)
    assert not torch.equal(outputs(copied, inputs)[0], outputs(model, inputs)[0])


def test_a_timm_model_is_pickled():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, num_classes=3).eval()
    model = stir(linearize.convert(linearize.conversion.timm.wrap(model, {"depth": 2}), "elu"))
    pixels = torch.randn(2, 3, 32, 32)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(outputs(loaded, {"pixel_values": pixels})[0], outputs(model, {"pixel_values": pixels})[0])


def test_classes_are_found_by_name():
    assert model_module.LinearizedBertModel is type(converted("bert"))
    assert config_module.LinearizedBertConfig is model_module.LinearizedBertModel.config_class
    for module in (model_module, config_module):
        for name in ("LinearizedNothing", "Linearizedpipeline", "nothing"):
            with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
                getattr(module, name)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_traced_without_a_gradient(name):
    model = converted(name)
    model.config.return_dict, model.config.use_cache = False, False
    inputs = inputs_of(model)
    names = ["pixel_values"] if name == "vit" else ["input_ids", "attention_mask"]
    with torch.no_grad():
        traced = torch.jit.trace(model, example_kwarg_inputs={key: inputs[key] for key in names}, check_trace=False)
        if name != "vit":
            # Other tokens and other padding than those it was traced with.
            inputs["input_ids"] = inputs["input_ids"].flip(1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            inputs["attention_mask"][1, 5:] = 0
        got, expected = traced(**{key: inputs[key] for key in names})[0], model(**inputs)[0]
    real = inputs.get("attention_mask", torch.ones(expected.shape[:2])).bool()
    torch.testing.assert_close(got[real], expected[real], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_traced_without_a_mask(name):
    model = converted(name)
    model.config.return_dict, model.config.use_cache = False, False
    ids = inputs_of(model)["input_ids"]
    with torch.no_grad():
        traced = torch.jit.trace(model, example_kwarg_inputs={"input_ids": ids}, check_trace=False)
        got, expected = traced(input_ids=ids.flip(1))[0], model(input_ids=ids.flip(1))[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_laid_out_over_devices_before_there_are_weights(name):
    config = converted(name).config
    with init_empty_weights():
        empty = transformers.AutoModel.from_config(config)
    assert all(x.is_meta for x in empty.parameters())
    size = sum(x.numel() * x.element_size() for x in empty.parameters())
    placed = infer_auto_device_map(empty, max_memory={"cpu": int(size * 0.7), "disk": 10 * size})
    assert set(placed.values()) == {"cpu", "disk"}
