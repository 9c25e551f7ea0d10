"""Which heads need softmax: their shares add up to the error, and the head that copies is found."""

import pytest
import torch
from support.tiny import converted, inputs_of, outputs
from transformers import LlavaConfig, LlavaForConditionalGeneration

import linearize
from linearize.attention.interface import linear_attentions, observed
from linearize.conversion.plan import change_hybrids
from linearize.core.errors import ConfigError
from linearize.core.events import Advanced, Started
from linearize.fidelity import heads
from linearize.fidelity.heads import ROWS, TOKENS, head_shares, keep_heads, repeated, shortened
from linearize.modeling.plan import Plan

CAUSAL = "AutoModelForCausalLM"


def states(model, inputs):
    with torch.no_grad():
        return model.base_model(**inputs).last_hidden_state


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_shares_add_up_to_the_error(name, monkeypatch):
    monkeypatch.setattr(heads, "POINTS", 64)
    model = converted(name, CAUSAL if name == "llama" else "AutoModelForMaskedLM", "none", window=3)
    inputs = inputs_of(model)
    shares = head_shares(model, [inputs])
    with observed(model, lambda *_: None):
        wanted = states(model, inputs)
    mask = inputs.get("attention_mask", torch.ones(wanted.shape[:2]))[..., None]
    error = ((states(model, inputs) - wanted) * mask).square().sum() / (wanted * mask).square().sum()
    assert float(sum(share.sum() for share in shares.values())) == pytest.approx(float(error), rel=1e-2)
    assert {len(share) for share in shares.values()} == {4}


def test_the_heads_that_matter_are_kept():
    """The output projections of all heads but two are turned off: those two are the ones."""
    model = converted("llama", CAUSAL, "hedgehog", window=3)
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            weight = layer.self_attn.o_proj.weight
            keep = weight.unflatten(1, (4, -1))[:, number + 1].clone()
            weight.zero_()
            weight.unflatten(1, (4, -1))[:, number + 1] = keep
    plan = Plan.from_dict(model.config.linearize)
    told = []
    after = keep_heads(model, plan, 2, [inputs_of(model)], told.append)
    steps = [Advanced(step, 8) for step in range(1, 9)]  # Of the row, and of its first half read twice.
    tokens = inputs_of(model)["input_ids"].shape[1]
    assert told == [Started(f"finding the heads that need softmax, rows of {tokens} tokens"), *steps]
    assert [layer.hybrid.softmax_heads for layer in after.converted] == [(1,), (2,)]
    assert Plan.from_dict(model.config.linearize) == after
    assert [layer.hybrid.softmax_heads for layer in linear_attentions(model).values()] == [(1,), (2,)]


def test_texts_leave_the_heads_of_the_part_for_images_alone():
    """Its layers do not run on texts: a RuntimeError of PyTorch about an unused tensor."""
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    text = {**vision, "vocab_size": 60, "num_key_value_heads": 1, "model_type": "llama"}
    vision |= {"image_size": 16, "patch_size": 8, "model_type": "clip_vision_model"}
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=59)).eval()
    model = linearize.convert(model, window=4)
    rows = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(0))
    after = keep_heads(model, Plan.from_dict(model.config.linearize), 1, [{"input_ids": rows}])
    kept = {layer.module for layer in after.converted if layer.hybrid.softmax_heads}
    assert len(after.converted) == 2 and kept == {"language_model.layers.0.self_attn"}


def test_a_row_as_long_as_those_to_train_on_is_added(monkeypatch):
    """SmolLM2's head 18:8 looks up over 4,000 tokens only: with it, `--preset recall` finds numbers that far back."""
    monkeypatch.setattr(heads, "TOKENS", 6)
    monkeypatch.setattr(heads, "LONGEST", 12)
    model = converted("llama", CAUSAL, "hedgehog", window=3)
    read, told = [], []
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda _, given: read.append(given[0].shape[1]))
    rows = inputs_of(model, tokens=16)
    keep_heads(model, Plan.from_dict(model.config.linearize), 2, [rows], told.append, trained_on=rows)
    handle.remove()
    started = [event.what for event in told if isinstance(event, Started)]
    assert started == [f"finding the heads that need softmax, rows of {tokens} tokens" for tokens in (6, 12)]
    assert {tokens: read.count(tokens) for tokens in read} == {6: 2 * (1 + 2 * 4), 12: 1 + 2 * 4}
    assert all("forward" not in vars(layer) for layer in model.model.layers)


def test_a_window_that_holds_the_row_does_not_hide_the_heads():
    """With `--preset recall`, rows of two windows led to heads that find four needles of ten, others find all."""
    chosen = []
    for window in (64, 1):
        model = converted("llama", CAUSAL, "hedgehog", window=window)
        after = keep_heads(model, Plan.from_dict(model.config.linearize), 3, [inputs_of(model, tokens=12)])
        chosen.append([layer.hybrid.softmax_heads for layer in after.converted])
        assert {layer.hybrid.window for layer in linear_attentions(model).values()} == {window}
    assert chosen[0] == chosen[1]


def test_kept_heads_survive_a_save(tmp_path):
    from transformers import AutoModelForCausalLM

    model = converted("llama", CAUSAL, "hedgehog", window=3)
    keep_heads(model, Plan.from_dict(model.config.linearize), 3, [inputs_of(model)])
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for one, two in zip(outputs(model, inputs_of(model)), outputs(again, inputs_of(model)), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("kernel", ["diag_softmax", "norm_elu"])
def test_heads_are_found_beside_layers_that_can_keep_none(kernel):
    model = converted("llama", CAUSAL, layers={0: "hedgehog", 1: kernel})
    plan = Plan.from_dict(model.config.linearize)
    after = keep_heads(model, plan, 4, [inputs_of(model)])
    assert [layer.hybrid.softmax_heads for layer in after.converted] == [(0, 1, 2, 3), ()]
    # As a resumed run does.
    again = converted("llama", CAUSAL, layers={0: "hedgehog", 1: kernel})
    assert change_hybrids(again, {layer.module: layer.hybrid for layer in after.converted}) == after
    with pytest.raises(ConfigError, match="got 5, but the converted layers have 4 heads that can keep it"):
        keep_heads(model, plan, 5, [inputs_of(model)])


def test_more_heads_than_there_are():
    model = converted("llama", CAUSAL, "hedgehog")
    with pytest.raises(ConfigError, match="got 9, but the converted layers have 8 heads that can keep it"):
        keep_heads(model, Plan.from_dict(model.config.linearize), 9, [inputs_of(model)])


def test_long_rows_are_shortened():
    """Heads are chosen by backward passes, which long rows would make take an hour."""
    batch = {"input_ids": torch.zeros(5, 700, dtype=torch.long), "attention_mask": torch.ones(5, 700)}
    assert {x.shape for x in shortened(batch, causal=True).values()} == {(ROWS, TOKENS)}
    assert {x.shape for x in shortened(batch, causal=False).values()} == {(ROWS, 700)}


def test_rows_are_repeated():
    ids = torch.arange(10)[None]
    assert repeated({"input_ids": ids})["input_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]
    assert repeated({"input_ids": ids}, segment=2)["input_ids"].tolist() == [[0, 1, 2, 3, 4, 4, 2, 3, 0, 1]]
    padded = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 9 + [0]])}
    assert repeated(padded)["input_ids"].tolist() == ids.tolist()
