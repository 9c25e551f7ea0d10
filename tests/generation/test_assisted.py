"""Assisted (speculative) decoding, prompt lookup, and caches that are cropped: the text of plain greedy decoding."""

from __future__ import annotations

import copy

import pytest
import torch
from support.generation import GREEDY, assert_same_text, causal, generate_and_check, prompts
from support.tiny import converted, inputs_of, original, stir

import linearize
from linearize.attention import cache as cache_module
from linearize.core.errors import ConfigError

KERNELS = {
    "hedgehog": {},
    "flexformer_n": {},
    "elu": {"window": 3},
    "cosformer": {},
    "diag_softmax": {"kernel_args": {"block": 4}},
}


def near(name: str, amount: float = 0.02):
    """A model that mostly, but not always, says what the one of its name says."""
    model = causal(name)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount * torch.randn(parameter.shape, generator=generator))
    return model


def drafting(model, tokens: int = 5):
    """Have a model draft so many tokens, however unsure it is."""
    model.generation_config.assistant_confidence_threshold = 0.0
    model.generation_config.num_assistant_tokens = tokens
    return model


def counted(model):
    """Count the forwards of a model."""
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    return calls


def generated(model, inputs, **options):
    """Generate with the logits of every token."""
    return model.generate(**inputs, **GREEDY, **options, return_dict_in_generate=True, output_logits=True)


@pytest.mark.sampled("one")
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_assisted_by_another_model(name):
    model, inputs = causal(name), prompts(batch=1, padded=False)
    same = drafting(copy.deepcopy(model), 20)
    for assistant in (near(name), original(name, "AutoModelForCausalLM"), stir(causal(name))):
        calls = counted(model)
        out = generated(model, inputs, assistant_model=drafting(assistant))
        assert 1 < len(calls) <= 13
        assert_same_text(model, inputs, out.sequences, out.logits)
    # Its own copy is always right, so that few forwards are left.
    calls = counted(model)
    out = generated(model, inputs, assistant_model=same)
    assert len(calls) <= 4
    assert_same_text(model, inputs, out.sequences, out.logits)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_softmax_model_assisted_by_a_converted_one(name):
    model, inputs = original(name, "AutoModelForCausalLM"), prompts(batch=1, padded=False)
    generate_and_check(model, inputs, **GREEDY, assistant_model=drafting(causal(name)))


@pytest.mark.parametrize("options", [{}, {"keep_softmax": [0]}], ids=["linear", "mixed"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_prompt_lookup(name, options):
    model = causal(name, **options)
    ids = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]])
    more = {**GREEDY, "max_new_tokens": 30}
    made = generate_and_check(model, {"input_ids": ids}, **more, prompt_lookup_num_tokens=4)
    # The cache holds what was said, and nothing that was only proposed.
    cache = made.past_key_values
    assert cache.get_seq_length() == made.sequences.shape[1] - 1
    with torch.no_grad():
        step = model(made.sequences[:, -1:], past_key_values=cache).logits[:, -1]
    after = torch.cat([made.sequences, step.argmax(-1, keepdim=True)], dim=1)
    assert_same_text(model, {"input_ids": ids}, after, [*made.logits, step])


def test_an_encoder_decoder_is_assisted():
    model = converted("bart", "AutoModelForSeq2SeqLM")
    inputs = {key: x[:1] for key, x in inputs_of(model).items()}
    options = {**GREEDY, "forced_eos_token_id": None}
    for more in (
        {"assistant_model": drafting(converted("bart", "AutoModelForSeq2SeqLM", "elu"))},
        {"prompt_lookup_num_tokens": 3},
    ):
        generate_and_check(model, inputs, **options, **more)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_cropped_cache_is_the_cache_of_the_tokens_that_are_left(kernel):
    model, inputs = causal("llama", kernel, **KERNELS[kernel]), prompts(tokens=24)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def read(cache, start, stop):
        with torch.no_grad():
            part = slice(start, stop)
            return model(
                ids[:, part],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, part],
                past_key_values=cache,
            ).logits

    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache = model.new_cache(crop=3)
    assert cache.is_croppable
    # A long prompt, steps, pieces; back by up to three, twice in a row, and by what was just read.
    read(cache, 0, 9)
    for start, stop, back in ((9, 10, 1), (9, 10, 0), (10, 11, 3), (8, 12, 2), (10, 13, 3), (10, 15, 1), (14, 24, 0)):
        got = read(cache, start, stop)
        torch.testing.assert_close(got, whole[:, start:stop], rtol=1e-4, atol=1e-5)
        cache.crop(-min(back, 1))
        cache.crop(-max(back - 1, 0))
        assert cache.get_seq_length() == stop - back
        sizes = [layer.recorded.length for layer in cache.layers]
        assert all(size <= 6 for size in sizes)
    cache.crop(-3)
    with pytest.raises(ConfigError, match=r"crop: got 99 tokens to remove, .* in advance: model.new_cache"):
        cache.crop(-99)


def test_layers_that_keep_their_window_are_cropped_too():
    model, ids = causal("gemma3"), prompts(tokens=40, padded=False)["input_ids"]
    assert any(kind == "sliding_attention" for kind in model.config.layer_types)
    cache = model.new_cache(crop=8)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        model(ids, past_key_values=cache)
        for back in (-2, -5):
            cache.crop(back)
        assert cache.get_seq_length() == 33
        got = model(ids[:, 33:], past_key_values=cache).logits
    torch.testing.assert_close(got, whole[:, 33:], rtol=1e-4, atol=1e-5)


def test_a_refused_crop_removes_nothing_from_any_layer():
    """The first layer here keeps softmax and its keys; it was cropped before the next one refused."""
    model, ids = causal("gpt2", keep_softmax=[0]), prompts(tokens=20, padded=False)["input_ids"]
    cache = model.new_cache(crop=2)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        model(ids[:, :16], past_key_values=cache)
        with pytest.raises(ConfigError, match="crop: got 9 tokens"):
            cache.crop(-9)
        assert {layer.get_seq_length() for layer in cache.layers} == {16}
        got = model(ids[:, 16:], past_key_values=cache).logits
    torch.testing.assert_close(got, whole[:, 16:], rtol=1e-4, atol=1e-5)


def test_what_was_kept_for_a_crop_follows_the_beams():
    model, inputs = causal("gpt2"), prompts(padded=False)
    ids, order = inputs["input_ids"], torch.tensor([2, 0, 0])
    cache = model.new_cache(crop=4)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.reorder_cache(order)
        cache.crop(-2)
        got = model(ids[order, 7:], past_key_values=cache).logits
        whole = model(ids[order], use_cache=False).logits
    torch.testing.assert_close(got, whole[:, 7:], rtol=1e-4, atol=1e-5)
    size = cache.nbytes()
    cache.reset()
    assert cache.nbytes() == 0 < size


def test_a_cache_that_was_not_asked_for_it_is_not_cropped():
    model = causal("gpt2")
    cache = model.new_cache()
    assert not cache.is_croppable
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
    size = cache.nbytes()
    cache.crop(0)
    with pytest.raises(ConfigError, match=r"crop: got 1 tokens to remove, .* can remove only 0"):
        cache.crop(-1)
    with pytest.raises(ConfigError, match="expected 0 or less"):
        cache.layers[0].crop(2)
    # transformers' way to ask; what is settled is let go.
    cache.activate_past_recording()
    with torch.no_grad():
        model(torch.tensor([[8, 9]]), past_key_values=cache)
        assert cache.is_croppable and cache.nbytes() > size
        cache.crop(0)
        assert cache.nbytes() == size


def test_of_a_long_prompt_only_the_end_is_kept(monkeypatch):
    monkeypatch.setattr(cache_module, "RECORDED", 4)
    model, inputs = causal("gpt2"), prompts(batch=1, tokens=30, padded=False)
    cache = model.new_cache()
    cache.activate_past_recording()
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        assert {layer.recorded.length for layer in cache.layers} == {4}
        cache.crop(-2)
        got = model(inputs["input_ids"][:, 28:], past_key_values=cache).logits
        whole = model(**inputs, use_cache=False).logits
    torch.testing.assert_close(got, whole[:, 28:], rtol=1e-4, atol=1e-5)


def test_assisted_by_a_checkpoint(tmp_path):
    """The assistant's checkpoint, as people have it: saved and loaded."""
    model, inputs = causal("llama"), prompts(batch=1, padded=False)
    linearize.save(near("llama"), tmp_path / "assistant")
    from transformers import AutoModelForCausalLM

    assistant = drafting(AutoModelForCausalLM.from_pretrained(tmp_path / "assistant").eval())
    generate_and_check(model, inputs, **GREEDY, assistant_model=assistant)
