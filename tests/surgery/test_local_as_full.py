"""Layers with a sliding window, converted as full attention where that is asked for."""

from __future__ import annotations

import functools
import importlib
from inspect import signature

import pytest
import torch
import transformers
from support.generation import GREEDY, causal, generate_and_check, prompts
from support.tiny import converted, inputs_of, original, outputs, stir
from transformers import AutoModel, AutoModelForCausalLM
from transformers.masking_utils import sliding_window_overlay

import linearize
from linearize.attention.interface import linear_attentions
from linearize.conversion.plan import expectations
from linearize.core.errors import UnsupportedModelError
from linearize.modeling.plan import LOCAL

WINDOWED = {"mistral": {"sliding_window": 4}, "gemma3": {}, "modernbert": {}}


def test_the_refusal_names_the_option():
    with pytest.raises(
        UnsupportedModelError, match=r"already linear; local_as_full=True \(--local-as-full\) converts it"
    ):
        linearize.plan(original("mistral", sliding_window=4))


@pytest.mark.parametrize("name", WINDOWED)
def test_all_layers_are_planned_and_say_what_they_lose(name):
    model = original(name, **WINDOWED[name])
    plan = linearize.plan(model, local_as_full=True)
    local = 2
    assert len(plan.converted) == len(plan.layers) == model.config.num_hidden_layers
    assert len(plan.local_as_full) == local
    assert all(layer.shape.causal == (name != "modernbert") for layer in plan.layers)
    assert linearize.Plan.from_dict(plan.to_dict()) == plan
    assert expectations(plan)[0].startswith(f"{local} of {len(plan.layers)} converted layers attended inside a window")
    # Without the option nothing is written that was not before.
    if name != "mistral":
        assert not any(LOCAL in layer.host for layer in linearize.plan(original(name)).layers)


def test_it_is_what_the_model_without_a_window_becomes():
    windowed = stir(
        linearize.convert(original("mistral", "AutoModelForCausalLM", sliding_window=4), local_as_full=True)
    )
    plain = stir(linearize.convert(original("mistral", "AutoModelForCausalLM")))
    inputs = prompts(tokens=23)
    with torch.no_grad():
        assert torch.equal(windowed(**inputs).logits, plain(**inputs).logits)
    made = [model.generate(**inputs, **GREEDY).tolist() for model in (windowed, plain)]
    assert made[0] == made[1]


@pytest.mark.parametrize("options", [{}, {"keep_softmax": [0]}], ids=["all", "one kept"])
@pytest.mark.parametrize("name", ["gemma3", "modernbert"])
def test_padding_reload_and_reach(name, options, tmp_path):
    model = converted(name, local_as_full=True, **options)
    assert len(linear_attentions(model)) == 4 - len(options)
    inputs = inputs_of(model, tokens=23)
    together = outputs(model, inputs)[0]
    alone = outputs(model, {"input_ids": inputs["input_ids"][:1, :20]})[0]
    torch.testing.assert_close(together[:1, :20], alone, rtol=1e-4, atol=1e-5)
    linearize.save(model, tmp_path / "out")
    loaded = AutoModel.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(outputs(loaded, inputs)[0], together)
    assert [layer.local_as_full for layer in linear_attentions(loaded).values()] == [
        layer.local_as_full for layer in linear_attentions(model).values()
    ]


@pytest.mark.sampled("values")
@pytest.mark.parametrize("options", [{}, {"keep_softmax": [0]}], ids=["all", "one kept"])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_generation(name, options, tmp_path):
    model = causal(name, config=WINDOWED[name], local_as_full=True, **options)
    inputs = prompts()
    out = generate_and_check(model, inputs, **GREEDY)
    linearize.save(model, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(loaded.generate(**inputs, **GREEDY), out.sequences)


def test_the_original_is_compared_inside_its_window():
    """The check is no formality: a host that does something else is still found, and one beyond the window is not."""
    linearize.convert(original("mistral", sliding_window=5), local_as_full=True)
    ids = torch.arange(3, 23)[None]
    linearize.convert(original("mistral", sliding_window=5), local_as_full=True, example_inputs={"input_ids": ids})
    model = original("mistral", sliding_window=5)
    base = type(model)

    class Elsewhere(base):
        def forward(self, input_ids=None, **kwargs):
            full = self.config._attn_implementation.startswith("linearize")
            return super().forward(input_ids.roll(1, -1) if full else input_ids, **kwargs)

    model.__class__ = Elsewhere
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        linearize.convert(model, local_as_full=True)


@pytest.mark.parametrize("name", WINDOWED)
def test_training_with_default_arguments_is_training_without_a_cache(name):
    """The host then makes a cache of windows itself."""
    model = converted(name, config=WINDOWED[name], local_as_full=True).train()
    inputs, found = inputs_of(model, tokens=23), []
    for options in ({}, {"use_cache": False}) if "use_cache" in signature(model.forward).parameters else ({}, {}):
        model.zero_grad()
        torch.manual_seed(0)
        model(**inputs, **options)[0].pow(2).sum().backward()
        found.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
    assert len(found[0]) > 10
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


DERIVED = {
    "slice": lambda mask: mask[:, :, -0:, :],
    "copy": torch.clone,
    "numbers": lambda mask: torch.where(mask, 0.0, torch.finfo(torch.float32).min),
    "heads": lambda mask: mask.expand(-1, 4, -1, -1),
}


@pytest.mark.sampled("values")
@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
@pytest.mark.parametrize("overlay", [False, True], ids=["argument", "overlay"])
def test_a_window_is_known_by_what_it_hides(derive, overlay, monkeypatch):
    """It may be longer than the inputs of the trial run, derived from transformers' mask, or put over a causal one."""
    file = importlib.import_module("transformers.models.mistral.modeling_mistral")
    make = file.create_sliding_window_causal_mask
    if overlay:
        window = {"and_mask_function": sliding_window_overlay(4096)}
        make = functools.partial(file.create_causal_mask, **window)
    monkeypatch.setattr(file, "create_sliding_window_causal_mask", lambda **kwargs: derive(make(**kwargs)))
    with pytest.raises(UnsupportedModelError, match=r"already linear; local_as_full=True"):
        linearize.plan(original("mistral", sliding_window=4096))


def _gemma4(kind, **changes):
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "head_dim": 8, "global_head_dim": 8}
    heads = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"sliding_window": 4, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
    more = {} if "Unified" in kind else {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99}
    config = getattr(transformers, f"{kind}TextConfig")(**{**sizes, **heads, **layers, **more, **changes})
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.sampled("values")
@pytest.mark.parametrize("window", [4, 512])
@pytest.mark.parametrize("shared", [0, 3])
@pytest.mark.parametrize("kind", ["Gemma4", "Gemma4Unified"])
def test_layers_that_share_keys_keep_their_windows(kind, shared, window):
    changes = {"num_kv_shared_layers": shared, "sliding_window": window}
    model, inputs = _gemma4(kind, **changes), prompts(tokens=17)
    with torch.no_grad():
        expected = model(**inputs).logits
        plan = linearize.plan(model, "none", window=64)
        assert [layer.module.split(".")[1] for layer in plan.converted] == ["2", "5"]
        found = linearize.apply(model, plan)(**inputs).logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)
    generate_and_check(stir(linearize.convert(_gemma4(kind, **changes))), inputs, **GREEDY)
    plan = linearize.plan(_gemma4(kind, **changes), local_as_full=True)
    assert all("keys that several layers share" in layer.reason for layer in plan.layers if not layer.converted)
    assert len(plan.converted) == (3 if shared else 5)


@pytest.mark.parametrize("layers", [["sliding_attention", "full_attention"] * 2, ["sliding_attention"] * 4])
@pytest.mark.parametrize("local_as_full", [False, True])
def test_windows_that_see_ahead(layers, local_as_full, tmp_path):
    """EmbeddingGemma: all its masks are unions, of which some hide nothing."""
    if not local_as_full and "full_attention" not in layers:
        with pytest.raises(UnsupportedModelError, match="local_as_full=True"):
            linearize.plan(original("gemma3", layer_types=layers, use_bidirectional_attention=True))
        return
    # Inside the window nothing is lost; beyond it, only where layers lose it.
    tokens = 3 if local_as_full else 23
    model = original("gemma3", layer_types=layers, use_bidirectional_attention=True)
    inputs = {key: x[:, :tokens] for key, x in inputs_of(model, tokens=23).items()}
    real = inputs["attention_mask"].bool()
    expected = outputs(model, inputs)[0]
    model = linearize.convert(model, "none", window=64, local_as_full=local_as_full)
    assert not any(layer.shape.causal for layer in linear_attentions(model).values())
    torch.testing.assert_close(outputs(model, inputs)[0][real], expected[real], rtol=1e-4, atol=1e-5)
    longer = inputs_of(model, tokens=23)
    together = outputs(model, longer)[0]
    alone = outputs(model, {"input_ids": longer["input_ids"][:1, :20]})[0]
    torch.testing.assert_close(together[:1, :20], alone, rtol=1e-4, atol=1e-5)
    linearize.save(model, tmp_path / "out")
    assert torch.equal(outputs(AutoModel.from_pretrained(tmp_path / "out").eval(), longer)[0], together)
