"""Generation with a state of constant size gives what the full forward without a cache gives."""

from __future__ import annotations

import types

import pytest
import torch
import transformers
from support.generation import GREEDY, assert_same_beams, causal, generate_and_check, prompts
from support.tiny import converted, inputs_of, original, stir
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, StaticCache

import linearize
from linearize.attention.cache import LinearizeCache, cache_argument, given_cache
from linearize.attention.interface import observed
from linearize.conversion.plan import set_trained_length
from linearize.core.errors import ConfigError, LinearizeError, UnsupportedModelError

CAUSAL = ["gpt2", "llama", "qwen2", "mistral", "gemma3"]
KERNELS = ["hedgehog", "flexformer_s", "flexformer_n"]


@pytest.mark.sampled("values")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CAUSAL)
def test_greedy_with_left_padding_equals_full_forwards(name, kernel):
    model, inputs = causal(name, kernel), prompts()
    out = generate_and_check(model, inputs, **GREEDY)
    assert type(out.past_key_values).__name__ == "LinearizeCache"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_mixed_with_softmax_layers(name):
    model, inputs = causal(name, keep_softmax=[0]), prompts()
    out = generate_and_check(model, inputs, **GREEDY)
    assert out.past_key_values.layers[0].keys.shape[2] == 9 + 11
    assert out.past_key_values.layers[1].state["kv"].shape[:2] == (
        3,
        model.config.get_text_config().num_key_value_heads if name == "llama" else 4,
    )


@pytest.mark.sampled("values")
@pytest.mark.parametrize("chunk", [1, 2, 4, 100])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_prefill_in_pieces(name, chunk):
    generate_and_check(causal(name), prompts(), **GREEDY, prefill_chunk_size=chunk)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_cache_handed_over_by_the_user(name):
    model, inputs = causal(name), prompts(padded=False)
    cache = model.new_cache()
    with torch.no_grad():
        for part in inputs["input_ids"][:, :6].split([1, 3, 2], dim=1):
            model(part, past_key_values=cache)
    assert cache.get_seq_length() == 6
    made = generate_and_check(model, inputs, **GREEDY, past_key_values=cache).sequences
    assert cache.get_seq_length() == made.shape[1] - 1


def test_a_cache_filled_in_inference_mode():
    model, inputs = causal("gpt2"), prompts(padded=False)
    with torch.inference_mode():
        cache = model(inputs["input_ids"][:, :-1], use_cache=True).past_key_values
    generate_and_check(model, inputs, **GREEDY, past_key_values=cache)


@pytest.mark.sampled("values")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_plain_cache_of_all_keys_works_too(name, padded):
    model, inputs = causal(name), prompts(padded=padded)
    plain = DynamicCache(config=model.config)
    out = generate_and_check(model, inputs, **GREEDY, past_key_values=plain)
    assert out.past_key_values is plain


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_forward_returns_a_cache_that_goes_on(name):
    model, inputs = causal(name), prompts(padded=False)
    ids = inputs["input_ids"]
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        first = model(ids[:, :5])
        assert isinstance(first.past_key_values, LinearizeCache)
        second = model(ids[:, 5:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), full, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_beams_equal_beams_without_cache(name):
    model, inputs = causal(name), prompts()
    options = {**GREEDY, "num_beams": 3, "num_return_sequences": 2}
    assert assert_same_beams(model, inputs, **options).sequences.shape == (6, 21)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sampling_draws_from_the_logits_of_full_forwards(name):
    model, inputs = causal(name), prompts()
    drawn = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        sampled = {**GREEDY, "do_sample": True, "top_k": 20}
        drawn.append(generate_and_check(model, inputs, greedy=False, **sampled).sequences)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("beams", [1, 3])
def test_encoder_decoder(beams):
    model = converted("bart", "AutoModelForSeq2SeqLM")
    inputs = inputs_of(model)
    inputs["attention_mask"][0, -3:] = 0
    options = {**GREEDY, "num_beams": beams, "forced_eos_token_id": None}
    check = generate_and_check if beams == 1 else assert_same_beams
    made = check(model, inputs, **options)
    assert type(made.past_key_values.self_attention_cache).__name__ == "LinearizeCache"


def test_cache_bytes_do_not_grow():
    model = causal("llama")
    sizes = set()
    for tokens in (1, 7, 50):
        cache = model.new_cache()
        with torch.no_grad():
            model(torch.randint(3, 96, (2, tokens)), past_key_values=cache)
        sizes.add(cache.nbytes())
    layers, key_heads, features, width = 2, 2, 16, 8 + 1
    assert sizes == {layers * 4 * 2 * key_heads * (features * width + 1)}


class Steps(TorchDispatchMode):
    """Writes down every operation with the shapes that it reads."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [tuple(x.shape) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self.found.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


def test_work_per_token_does_not_grow_with_the_context():
    """After 512 and 16,384 tokens: the same operations on tensors of the same shapes, and as many bytes of cache."""
    model = causal("gpt2", config={"n_positions": 16_640})
    token, caches = torch.tensor([[5]]), []
    with torch.no_grad():
        for context in (512, 16_384):
            caches.append(model.new_cache())
            model(torch.randint(3, 96, (1, context)), past_key_values=caches[-1], logits_to_keep=1)
        steps = []
        for cache in caches:
            with Steps() as work:
                model(token, past_key_values=cache)
            steps.append(work.found)
    assert caches[0].nbytes() == caches[1].nbytes()
    assert len(steps[0]) > 20 and steps[0] == steps[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
        ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_token(options, message):
    with pytest.raises(ConfigError, match=message):
        causal("gpt2").generate(**prompts(batch=1, padded=False), **GREEDY, **options)


def test_a_static_cache_that_the_original_asked_for_is_left_out():
    model, inputs = causal("gpt2"), prompts(batch=1, padded=False)
    expected = model.generate(**inputs, **GREEDY)
    model.generation_config.cache_implementation = "static"
    with pytest.warns(UserWarning, match="generation_config.json has cache_implementation='static', which is ignored"):
        assert torch.equal(model.generate(**inputs, **GREEDY), expected)
    assert model.generation_config.cache_implementation == "static"


def test_the_cache_of_a_forward_that_failed_is_not_used_again():
    model, ids = causal("llama"), prompts(padded=False)["input_ids"]
    cache = model.new_cache()
    with pytest.raises(UnsupportedModelError, match="got an attention mask of shape"):
        model(ids, past_key_values=cache, attention_mask=torch.rand(3, 1, 9, 9))
    with pytest.raises(LinearizeError, match=r"the last forward failed \(begin again with a new cache\)"):
        model(ids, past_key_values=cache)


@pytest.mark.parametrize("in_steps", [True, False])
def test_a_cache_copied_key_by_key_is_refused(in_steps):
    model, ids = causal("llama", keep_softmax=[0]), prompts(padded=False)["input_ids"]
    pairs = [(layer.keys, layer.values) for layer in model(ids[:, :5]).past_key_values.layers]
    copy = DynamicCache() if in_steps else DynamicCache(pairs)
    for index, pair in enumerate(pairs if in_steps else ()):
        copy.update(*pair, index)
    with pytest.raises(ConfigError, match="got a generation cache without any keys, which was rebuilt"):
        model(ids[:, 5:], past_key_values=copy)


def test_continuous_batching_is_refused_before_it_starts():
    model = causal("llama")
    for call in (lambda: model.generate_batch([[5, 6, 7], [8, 9]], max_new_tokens=2), model.init_continuous_batching):
        with pytest.raises(
            ConfigError, match=r"continuous batching \(generate_batch\).* use generate\(\) with the prompts"
        ):
            call()


LOCAL = {"config": {"sliding_window": 4}, "local_as_full": True}


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name in ("gpt2", "llama") for options in ({}, {"keep_softmax": [0]})] + [("mistral", LOCAL)],
)
def test_attention_weights_while_generating(name, padded, options):
    """They are those of full forwards, [B, H, 1, S] at a step: the cache keeps all keys where they are asked for."""
    model, inputs = causal(name, **options), prompts(padded=padded)
    out = generate_and_check(model, inputs, **GREEDY, output_attentions=True)
    mask = torch.ones_like(out.sequences)
    if padded:
        mask[:, :9] = inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    more = {"attention_mask": mask[:, :-1], "position_ids": positions[:, :-1], "output_attentions": True}
    with torch.no_grad():
        whole = model(out.sequences[:, :-1], **more, use_cache=False).attentions
    for step, layers in enumerate(out.attentions[1:], start=9):
        for got, expected in zip(layers, whole, strict=True):
            torch.testing.assert_close(got[:, :, 0], expected[:, :, step, : step + 1], rtol=1e-4, atol=1e-6)


def test_a_mask_with_the_window_of_another_layer_is_refused_with_all_keys():
    model, inputs = causal("mistral", **LOCAL, keep_softmax=[1]), prompts()
    generate_and_check(model, inputs, **GREEDY)
    with pytest.raises(ConfigError, match="all keys, but this layer was converted as full"):
        model.generate(**inputs, **GREEDY, past_key_values=DynamicCache())


def test_attention_weights_behind_a_state_are_refused():
    """They were weights over the new tokens alone, as if nothing had come before, without a word."""
    model, ids = causal("llama"), prompts(padded=False)["input_ids"]
    cache = model.new_cache()
    with torch.no_grad():
        first = model(ids[:, :8], past_key_values=cache, output_attentions=True).attentions[0]
        assert torch.equal(first, model(ids[:, :8], use_cache=False, output_attentions=True).attentions[0])
        with pytest.raises(ConfigError, match="sum over 8 tokens instead of their keys"):
            model(ids[:, 8:], past_key_values=cache, output_attentions=True)
        # A cache that the model makes by itself can go on with them.
        out = model(ids[:, :8], output_attentions=True, use_cache=True)
        step = model(ids[:, 8:], past_key_values=out.past_key_values, output_attentions=True).attentions[0]
        whole = model(ids, output_attentions=True, use_cache=False).attentions[0]
    torch.testing.assert_close(step[:, :, 0], whole[:, :, 8], rtol=1e-4, atol=1e-6)


def test_static_cache_of_the_user_is_refused():
    model, inputs = causal("llama"), prompts(batch=1, padded=False)
    with pytest.raises(ConfigError, match="StaticLayer"):
        model.generate(**inputs, **GREEDY, past_key_values=StaticCache(config=model.config, max_cache_len=64))


def test_a_cache_that_the_attention_never_reads_is_an_error():
    cache = causal("gpt2").new_cache()
    keys = torch.zeros(1, 4, 1, 8)
    cache.update(keys, keys, 0)
    with pytest.raises(LinearizeError, match="use_cache=False"):
        cache.update(keys, keys, 0)


def test_text_generation_pipeline(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast, pipeline

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(99)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")
    linearize.save(causal("llama"), tmp_path / "out", processor=tokenizer)
    write = pipeline("text-generation", model=str(tmp_path / "out"))
    texts = write(["w5 w6 w7 w8", "w9"], max_new_tokens=4, do_sample=False, batch_size=2)
    alone = write("w9", max_new_tokens=4, do_sample=False)
    assert texts[1][0]["generated_text"] == alone[0]["generated_text"]
    assert texts[0][0]["generated_text"].startswith("w5 w6 w7 w8")


@pytest.mark.parametrize("options", [{}, {"keep_softmax": [0]}, {"local_as_full": True}], ids=str)
def test_layers_that_share_keys(options):
    """Gemma 4 (E2B, E4B): the last layers read the keys of earlier ones, and skip tokens of the prompt."""
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        **{"vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 6, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 8, "num_kv_shared_layers": 3},
        **{"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 4, "pad_token_id": 0},
        **{"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8, "max_position_embeddings": 128},
    )
    model = linearize.convert(transformers.Gemma4ForCausalLM(config).eval(), **options)
    ids = torch.randint(3, 90, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    generate_and_check(model, {"input_ids": ids, "attention_mask": mask}, **GREEDY)


def whisper(kind="WhisperForConditionalGeneration"):
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        **{"vocab_size": 99, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37},
        **{"max_source_positions": 30, "max_target_positions": 40, "decoder_start_token_id": 2, "pad_token_id": 0},
        **{"bos_token_id": 2, "eos_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
        init_std=0.5,
    )
    return getattr(transformers, kind)(config).eval()


def test_a_prompt_of_whisper_begins_as_it_is_given():
    """Its model type tells transformers to put no start token before it."""
    model, sound = whisper(), torch.randn(2, 8, 60)
    # With softmax in place of the kernels it is the original, which has no state.
    options = {"decoder_input_ids": torch.tensor([[7, 8], [7, 9]]), "max_new_tokens": 6, "use_cache": False}
    expected = model.generate(sound, **options)
    linearize.convert(model)
    with observed(model, lambda *call: None):
        assert torch.equal(model.generate(sound, **options), expected)


def test_whispers_decoder_drafts_for_whisper():
    """Its cache of all keys, emptied by a rejected draft, was taken for a state that was lost."""
    model, sound = linearize.convert(whisper()), torch.randn(1, 8, 60)
    assistant = whisper("WhisperForCausalLM")
    with torch.no_grad():
        assistant.proj_out.weight.copy_(assistant.proj_out.weight.roll(1, 0))
    linearize.convert(assistant)
    caches = []
    assistant.register_forward_hook(lambda *call: caches.append(type(call[-1].past_key_values.self_attention_cache)))
    plain = model.generate(sound, max_new_tokens=12)
    assert torch.equal(model.generate(sound, max_new_tokens=12, assistant_model=assistant), plain)
    assert set(caches) == {LinearizeCache}


@pytest.mark.parametrize("beams", [1, 2])
def test_whisper_returns_more_than_tokens(beams):
    """As its word timestamps need."""
    model = linearize.convert(whisper())
    sound = torch.randn(2, 8, 60)
    made = model.generate(
        sound, max_new_tokens=6, num_beams=beams, return_dict_in_generate=True, output_attentions=beams == 1
    )
    plain = model.generate(sound, max_new_tokens=6, num_beams=beams)
    assert torch.equal(made["sequences"][:, 1:], plain)
    if beams == 2:
        # Whisper puts caches together again from keys, and a state has none.
        again = {"encoder_outputs": model.get_encoder()(sound), "decoder_input_ids": plain[:, -1:]}
        with pytest.raises(ConfigError, match="generation cannot be resumed from it"):
            model(**again, past_key_values=made["past_key_values"])


def test_the_cache_function_bound_to_another_model():
    """As Kyutai STT does with its codec."""
    other = original("llama", "AutoModelForCausalLM")
    made: dict = {}
    prepare = types.MethodType(type(causal("llama"))._prepare_cache_for_generation, other)
    prepare(
        generation_config=other.generation_config,
        model_kwargs=made,
        generation_mode=None,
        batch_size=1,
        max_cache_length=8,
    )
    assert type(given_cache(made)) is DynamicCache


@torch.no_grad()
def test_a_model_that_fades_is_cropped_packed_and_padded():
    """Tokens are counted per row and document, and again after a crop."""
    model = stir(converted("llama", "AutoModelForCausalLM", window=3, sinks=1, scale="linear")).eval()
    set_trained_length(model, 6)
    ids = torch.arange(5, 45)[None]
    whole = model(ids, use_cache=False).logits
    cache = model.new_cache(crop=8)
    given = cache_argument(model, cache)
    model(ids[:, :30], **given)
    cache.crop(-5)
    steps = torch.cat([model(ids[:, i : i + 1], **given).logits for i in range(25, 40)], dim=1)
    torch.testing.assert_close(steps, whole[:, 25:], rtol=1e-4, atol=1e-5)
    packed = model(ids, position_ids=torch.cat([torch.arange(18), torch.arange(22)])[None], use_cache=False).logits
    parts = [model(part, use_cache=False).logits for part in ids.split([18, 22], dim=1)]
    torch.testing.assert_close(packed, torch.cat(parts, dim=1), rtol=1e-4, atol=1e-5)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :13] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    padded = model.generate(ids.repeat(2, 1), attention_mask=mask, **options)
    assert torch.equal(padded[0, 40:], model.generate(ids[:, 13:], **options)[0, 27:])
