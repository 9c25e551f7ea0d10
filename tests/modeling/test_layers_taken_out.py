"""Layers taken out of a converted model, added or moved: saved right from end to end, or refused before a write."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from support.tiny import converted, inputs_of, outputs

import linearize
from linearize.attention.interface import linear_attentions
from linearize.core.errors import CheckpointError
from linearize.modeling.plan import Plan

FOUR = {"num_hidden_layers": 4}
STACKS = {
    "bert": ("encoder.layer", "num_hidden_layers", FOUR),
    "llama": ("layers", "num_hidden_layers", FOUR),
    "gpt2": ("h", "n_layer", {"n_layer": 4}),
    "distilbert": ("transformer.layer", "n_layers", {"n_layers": 4}),
    "vit": ("layers", "num_hidden_layers", FOUR),
}
WAYS = {
    "save": linearize.save,
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
}


def changed(name, keep, count=None, head="AutoModel", **options):
    """A converted model of four layers with those that `keep` lists; the config says how many."""
    path, field, sizes = STACKS[name]
    model = converted(name, head, config=sizes, **options)
    stack, _, last = path.rpartition(".")
    parent = model.base_model.get_submodule(stack)
    layers = getattr(parent, last)
    setattr(parent, last, torch.nn.ModuleList([copy.deepcopy(layers[place]) for place in keep]))
    setattr(model.config, field, len(keep) if count is None else count)
    return model


@pytest.mark.sampled("values")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keep", [(0,), (0, 1), (2, 3), (0, 3)], ids=str)
@pytest.mark.parametrize("name", STACKS)
def test_layers_taken_out_are_saved_and_loaded(name, keep, way, tmp_path):
    """They were saved without a word, and the folder was then called damaged: the training was lost."""
    model = changed(name, keep)
    inputs = inputs_of(model)
    live = outputs(model, inputs, use_cache=False) if name in ("llama", "gpt2") else outputs(model, inputs)
    WAYS[way](model, tmp_path / "saved")
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "saved").eval()
    assert len(linear_attentions(loaded)) == len(keep) == len(Plan.from_dict(loaded.config.linearize).converted)
    again = outputs(loaded, inputs, use_cache=False) if name in ("llama", "gpt2") else outputs(loaded, inputs)
    assert all(torch.equal(a, b) for a, b in zip(live, again, strict=True))


def test_a_model_with_fewer_layers_still_generates(tmp_path):
    model = changed("llama", (0, 1), head="AutoModelForCausalLM", window=3)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    model.save_pretrained(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    want, got = (x.generate(ids, max_new_tokens=8, do_sample=False) for x in (model, loaded))
    assert torch.equal(want, got)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("keep", "count", "options", "words"),
    [
        ((0, 1), 4, {}, "was taken out, but the config still asks for it"),
        ((0, 1, 2, 3, 3), None, {}, "is not as config.linearize says"),
        ((1, 0), None, {"layers": {0: "elu"}}, "is not as config.linearize says"),
        ((1, 2, 3), None, {"keep_softmax": [0]}, "is not as config.linearize says"),
        ((0, 1), 3, {}, "was taken out, but the config still asks for it"),
    ],
)
def test_what_a_load_would_refuse_is_not_written(keep, count, options, words, way, tmp_path):
    model = changed("bert", keep, count, **options)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=words) as refused:
        WAYS[way](model, tmp_path / "saved")
    assert "\n" not in str(refused.value) and not (tmp_path / "saved" / "config.json").exists()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_load_of_some_layers_says_what_to_do(tmp_path):
    linearize.save(converted("bert", config=FOUR), tmp_path / "saved")
    with pytest.raises(CheckpointError, match="left layers out; load the whole checkpoint") as refused:
        transformers.AutoModel.from_pretrained(tmp_path / "saved", num_hidden_layers=1)
    assert "damaged" not in str(refused.value)
    model = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    model.encoder.layer, model.config.num_hidden_layers = model.encoder.layer[:1], 1
    model.save_pretrained(tmp_path / "one")
    assert len(linear_attentions(transformers.AutoModel.from_pretrained(tmp_path / "one"))) == 1
