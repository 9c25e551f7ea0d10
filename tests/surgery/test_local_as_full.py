"""Layers with a sliding window, converted as full attention where that is asked for."""

from __future__ import annotations

import pytest
import torch
from support.generation import GREEDY, causal, generate_and_check, prompts
from support.tiny import converted, inputs_of, original, outputs, stir
from transformers import AutoModel, AutoModelForCausalLM

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
