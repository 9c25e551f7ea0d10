"""Models that change their masks by other means than the attention call: followed, or refused in one line."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from architectures.shrink import tiny_config, tiny_model
from support.tiny import TEXT, inputs_of, original
from transformers import AttentionMaskInterface
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

import linearize
from linearize.attention.interface import linear_attentions, mask_without_window, observed
from linearize.attention.mixer import LOCAL_AS_FULL
from linearize.core.errors import LinearizeError, UnsupportedModelError

TOKENS = 12
TYPES = {
    "zeros": [0] * TOKENS,
    "ones": [1] * TOKENS,
    "prefix": [0] * 5 + [1] * 7,
    "image": [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
    "two images": [0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0],
}
MODELS = {
    # Their argument decides which tokens are read in both directions.
    "PaliGemmaForConditionalGeneration": ("token_type_ids", {}),
    "Gemma3ForConditionalGeneration": ("token_type_ids", {"text_config.sliding_window": 4}),
    "HrmTextForCausalLM": (
        "token_type_ids",
        {"prefix_lm": True, "num_layers_per_stack": 1, "L_cycles": 1, "H_cycles": 1},
    ),
    "Molmo2ForConditionalGeneration": ("mm_token_type_ids", {"adapter_config.vision_feature_layer": [1, 0]}),
    # Theirs does not change the mask.
    "BertModel": ("token_type_ids", {}),
    "Qwen2VLForConditionalGeneration": ("mm_token_type_ids", {"text_config.rope_parameters.mrope_section": [2, 1, 1]}),
}


def _build(name):
    cls = getattr(transformers, name)
    return tiny_model(cls, tiny_config(cls.config_class, overrides=MODELS[name][1]))


def _outputs(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.sampled("values")
@pytest.mark.parametrize("local_as_full", [False, True], ids=["", "local as full"])
@pytest.mark.parametrize("name", MODELS)
def test_what_the_layers_receive_is_followed_or_refused(name, local_as_full):
    """With softmax in place of its kernels, a converted model computes what the original does, or refuses."""
    model, argument = _build(name), MODELS[name][0]
    ids = torch.arange(3, 3 + TOKENS)[None].repeat(2, 1)
    padding = torch.ones_like(ids)
    padding[1, -2:] = 0
    more = {"use_cache": False} if "use_cache" in str(type(model).forward.__annotations__) else {}
    batches = [{"input_ids": ids, **more}, {"input_ids": ids, "attention_mask": padding, **more}]
    batches += [batch | {argument: torch.tensor([types, types])} for types in TYPES.values() for batch in batches[:2]]
    expected = [_outputs(model, batch) for batch in batches]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        linearize.convert(model, local_as_full=local_as_full)
    followed = 0
    with observed(model.eval(), lambda *call: None):
        for batch, want in zip(batches, expected, strict=True):
            try:
                got = _outputs(model, batch)
            except UnsupportedModelError as error:
                assert "\n" not in str(error) and argument in batch
                continue
            real = batch.get("attention_mask", torch.ones_like(ids)).bool()
            if not any(layer.local_as_full for layer in linear_attentions(model).values()):
                torch.testing.assert_close(got[real], want[real], rtol=0, atol=2e-5 * float(want.abs().max()))
            followed += 1
    # Texts alone are followed by every converted model.
    assert followed >= 4


def test_what_only_some_calls_change_is_named():
    with pytest.warns(UserWarning, match="token_type_ids can ask for a mask that linear attention cannot follow"):
        linearize.plan(_build("Gemma3ForConditionalGeneration"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linearize.plan(_build("BertModel"))


def test_what_texts_alone_change_stays_softmax():
    plan = linearize.plan(_build("PaliGemmaForConditionalGeneration"))
    reasons = {layer.reason for layer in plan.layers if layer.module.startswith("language_model")}
    assert len(reasons) == 1 and "in both directions" in reasons.pop()
    assert plan.converted and all(layer.module.startswith("vision_tower") for layer in plan.converted)


BLOCKS = torch.tensor([[-1, -1, 0, 0, 0, -1, -1, 1, 1, -1]])
PAIRS = {
    "union": {"or_mask_function": lambda row, head, query, key: key < 3},
    "intersection": {"and_mask_function": lambda row, head, query, key: (query - key) % 3 != 1},
    "blocks": {"block_sequence_ids": BLOCKS},
    "blocks far apart": {"block_sequence_ids": torch.tensor([[0, -1, 0, -1, 0, -1, 0, -1, 0, -1]])},
    "prefix": {"block_sequence_ids": torch.tensor([[0] * 4 + [-1] * 6])},
    "both": {"block_sequence_ids": BLOCKS, "and_mask_function": lambda row, head, query, key: key != 1},
}


@pytest.mark.parametrize("windowed", [False, True], ids=["", "window"])
@pytest.mark.parametrize("change", PAIRS)
def test_every_change_that_transformers_offers_is_refused(change, windowed):
    if windowed:
        model = linearize.convert(original("mistral", sliding_window=4), local_as_full=True).eval()
        create = transformers.masking_utils.create_sliding_window_causal_mask
    else:
        model, create = linearize.convert(original("llama")).eval(), create_causal_mask
    ids = torch.arange(3, 13)[None]
    embedded = model.get_input_embeddings()(ids)
    mask = create(model.config, embedded, None, None, **PAIRS[change])
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match="cannot follow a mask per pair"):
        model(ids, attention_mask=mask, use_cache=False)


def test_an_intersection_of_bidirectional_masks_is_refused():
    model = linearize.convert(original("bert")).eval()
    ids = torch.arange(3, 13)[None]
    mask = create_bidirectional_mask(model.config, model.get_input_embeddings()(ids), None, **PAIRS["intersection"])
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match="cannot follow a mask per pair"):
        model(ids, attention_mask=mask)


@pytest.mark.parametrize("kind", ["window", "chunks", "window in both directions"])
def test_windows_are_left_out_exactly(kind):
    config = transformers.MistralConfig(**TEXT, sliding_window=3, attention_chunk_size=3)
    config._attn_implementation = LOCAL_AS_FULL
    AttentionMaskInterface.register(LOCAL_AS_FULL, mask_without_window)
    create = {
        "window": transformers.masking_utils.create_sliding_window_causal_mask,
        "chunks": transformers.masking_utils.create_chunked_causal_mask,
        "window in both directions": transformers.masking_utils.create_bidirectional_sliding_window_mask,
    }[kind]
    embedded = torch.zeros(2, 8, 4)
    assert create(config, embedded, None, cache=None) is None
    padding = torch.ones(2, 8, dtype=torch.long)
    padding[0, -3:] = 0
    found = create(config, embedded, padding, cache=None)
    assert torch.equal(found.expand(2, 1, -1, 8)[:, 0, -1], padding.bool())


def test_a_direction_that_depends_on_padding_is_found():
    """A mask that hides nothing is left out, and then the module's own flag decides."""
    model = original("llama")
    for layer in model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(LinearizeError, match="without a mask it reads its tokens in both directions, else causally"):
        linearize.plan(model)


DIRECTIONS = {"llama": "AutoModelForCausalLM", "gpt2": "AutoModelForCausalLM", "bert": "AutoModel"}


@pytest.mark.parametrize("given", ["by the call", "in the config", "before a load"])
@pytest.mark.parametrize("name", DIRECTIONS)
def test_the_direction_that_a_call_asks_for_is_followed_or_refused(name, given, tmp_path):
    """transformers reads any decoder in both directions with `is_causal=False`; the kernels went on causally."""
    auto = getattr(transformers, DIRECTIONS[name])
    causal = name != "bert"
    model = linearize.convert(original(name, DIRECTIONS[name])).eval()
    inputs = inputs_of(model)
    expected = _outputs(model, inputs)
    model.save_pretrained(tmp_path)
    for asked in (causal, not causal):
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        if given == "before a load":
            config.is_causal = asked
        one = auto.from_pretrained(tmp_path, config=config).eval()
        if given == "in the config":
            one.config.is_causal = asked
        more = {"is_causal": asked} if given == "by the call" else {}
        if asked == causal:
            assert torch.equal(_outputs(one, inputs | more), expected)
            continue
        with pytest.raises(UnsupportedModelError, match=f"got is_causal={asked}, expected {causal}: a kernel has"):
            _outputs(one, inputs | more)


@pytest.mark.parametrize("kept", [(), [0]], ids=["", "a layer kept"])
def test_a_decoder_that_reads_in_both_directions_is_converted_so(kept, tmp_path):
    """Its modules say that they are causal, and each call that they are not."""
    model = original("llama", "AutoModelForCausalLM", is_causal=False)
    ids = torch.arange(3, 3 + TOKENS)[None].repeat(2, 1)
    padding = torch.ones_like(ids)
    padding[1, :2] = 0
    batches = [{"input_ids": ids}, {"input_ids": ids, "attention_mask": padding}]
    expected = [_outputs(model, batch) for batch in batches]
    changed = _outputs(model, {"input_ids": torch.cat([ids[:, :-1], ids[:, :1]], dim=1)})
    assert not torch.allclose(changed[:, 0], expected[0][:, 0])
    plan = linearize.plan(model, keep_softmax=kept)
    assert [layer.shape.causal for layer in plan.layers] == [False, False] and len(plan.converted) == 2 - len(kept)
    linearize.convert(model, keep_softmax=kept).save_pretrained(tmp_path)
    for one in (model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path)):
        with observed(one.eval(), lambda *call: None):
            for batch, want in zip(batches, expected, strict=True):
                real = batch.get("attention_mask", torch.ones_like(ids)).bool()
                torch.testing.assert_close(_outputs(one, batch)[real], want[real])


CHOOSING = {
    "MiniMaxM3SparseForConditionalGeneration": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 2,
        "index_topk_blocks": 5,
    },
    "MistralLarge4ForConditionalGeneration": {"index_topk": 10},
}


@pytest.mark.parametrize("name", CHOOSING)
def test_a_part_that_chooses_its_keys_goes_on_choosing(name, tmp_path):
    """It asks for SDPA by name: under ours it read all keys, which shows only beyond as many as it chooses."""
    cls = getattr(transformers, name)
    overrides = {f"text_config.{key}": value for key, value in CHOOSING[name].items()}
    model = tiny_model(cls, tiny_config(cls.config_class, overrides=overrides))
    ids = torch.arange(3, 27)[None].repeat(2, 1)
    padding = torch.ones_like(ids)
    padding[1, -2:] = 0
    batches = [{"input_ids": ids}, {"input_ids": ids, "attention_mask": padding}]
    expected = [_outputs(model, batch) for batch in batches]
    linearize.convert(model).save_pretrained(tmp_path)
    for one in (model, cls.from_pretrained(tmp_path)):
        for batch, want in zip(batches, expected, strict=True):
            real = batch.get("attention_mask", torch.ones_like(ids)).bool()
            torch.testing.assert_close(_outputs(one.eval(), batch)[real], want[real])
