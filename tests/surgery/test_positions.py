"""Longer inputs: every family reaches the new length, short inputs stay as they were, and a checkpoint keeps it all."""

from __future__ import annotations

import copy
import json

import pytest
import timm
import torch
import transformers as tf
from support.checkpoints import tokenizer as tokenizer_for
from support.tiny import original
from tokenizers import Tokenizer, models, pre_tokenizers

import linearize
from linearize.conversion.positions import (
    current_length,
    extend_image_size,
    extend_positions,
    extend_processor,
    text_length,
)
from linearize.core.errors import ConfigError, UnknownNameError, UnsupportedModelError

OLD, NEW = 16, 39  # NEW is no multiple of OLD: the last tile is cut
SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
BERT = {**SMALL, "max_position_embeddings": OLD}
ROBERTA = {**SMALL, "max_position_embeddings": OLD + 2}
LLAMA = {**BERT, "num_key_value_heads": 1}
GPT2 = {
    "vocab_size": 40,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": OLD,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
DISTILBERT = {
    "vocab_size": 40,
    "dim": 16,
    "hidden_dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "max_position_embeddings": OLD,
}
GPTNEO = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
    "max_position_embeddings": OLD,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
BART = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": OLD,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
# name: (model class, config class, options, table, rows before position 0)
TABLES = {
    "bert": ("BertForMaskedLM", "BertConfig", BERT, "bert.embeddings.position_embeddings", 0),
    "electra": (
        "ElectraForPreTraining",
        "ElectraConfig",
        {**BERT, "embedding_size": 8},
        "electra.embeddings.position_embeddings",
        0,
    ),
    "albert": ("AlbertModel", "AlbertConfig", {**BERT, "embedding_size": 8}, "embeddings.position_embeddings", 0),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        DISTILBERT,
        "distilbert.embeddings.position_embeddings",
        0,
    ),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", ROBERTA, "roberta.embeddings.position_embeddings", 2),
    "camembert": ("CamembertModel", "CamembertConfig", ROBERTA, "embeddings.position_embeddings", 2),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaConfig", ROBERTA, "embeddings.position_embeddings", 2),
    "mpnet": ("MPNetModel", "MPNetConfig", ROBERTA, "embeddings.position_embeddings", 2),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, "transformer.wpe", 0),
    "gpt-neo": ("GPTNeoForCausalLM", "GPTNeoConfig", GPTNEO, "transformer.wpe", 0),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**BERT, "ffn_dim": 16, "word_embed_proj_dim": 16},
        "model.decoder.embed_positions",
        2,
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART, "model.encoder.embed_positions", 2),
    "esm": ("EsmModel", "EsmConfig", {**ROBERTA, "mask_token_id": 5}, "embeddings.position_embeddings", 2),
    "dpr": ("DPRReader", "DPRConfig", BERT, "span_predictor.encoder.bert_model.embeddings.position_embeddings", 0),
    "nystromformer": (
        "NystromformerModel",
        "NystromformerConfig",
        {**BERT, "segment_means_seq_len": OLD, "num_landmarks": OLD},
        "embeddings.position_embeddings",
        2,
    ),
    "clip-text": ("CLIPTextModel", "CLIPTextConfig", BERT, "embeddings.position_embedding", 0),
}
VIT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
# name: (model class, config class, options, tokens besides the patches)
IMAGES = {
    "vit": ("ViTForImageClassification", "ViTConfig", VIT, 1),
    "deit": ("DeiTModel", "DeiTConfig", VIT, 2),
    "dinov2": ("Dinov2Model", "Dinov2Config", VIT, 1),
    "dinov2-registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {**VIT, "num_register_tokens": 3}, 4),
    "clip-vision": ("CLIPVisionModel", "CLIPVisionConfig", VIT, 1),
    "siglip-vision": ("SiglipVisionModel", "SiglipVisionConfig", VIT, 0),
    "beit-absolute": (
        "BeitModel",
        "BeitConfig",
        {**VIT, "use_absolute_position_embeddings": True, "use_relative_position_bias": False},
        1,
    ),
}


def build(family: str, **extra):
    cls, config, options, *_ = {**TABLES, **IMAGES}[family]
    return make(cls, config, {**options, **extra})


def make(cls: str, config: str, options: dict):
    torch.manual_seed(0)
    return getattr(tf, cls)(getattr(tf, config)(**options)).eval()


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 40, (2, length), generator=torch.Generator().manual_seed(length))


def first(model, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


def state(model) -> dict[str, torch.Tensor]:
    """Every tensor and the config, to see that a failed call left nothing behind."""
    tensors = {n: t.clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    return {**tensors, "config": torch.tensor(list(str(model.config.to_dict()).encode()))}


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def assert_close(got: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("family", TABLES)
def test_tile_reaches_the_new_length_and_keeps_short_inputs(family):
    table, kept = TABLES[family][3:]
    model = build(family)
    assert current_length(model) == OLD
    old = model.get_submodule(table).weight.detach().clone()
    short = first(model, input_ids=tokens(OLD))
    report = extend_positions(model, NEW)
    assert (report.old_length, report.new_length, report.method) == (OLD, NEW, "tile")
    assert f"{table}.weight" in report.changed
    new = model.get_submodule(table)
    assert new.num_embeddings == len(new.weight) == NEW + kept
    assert torch.equal(new.weight[: OLD + kept], old)
    trained = old[kept:]
    assert torch.equal(new.weight[kept:], torch.cat([trained, trained, trained])[:NEW])
    assert torch.equal(first(model, input_ids=tokens(OLD)), short)
    assert first(model, input_ids=tokens(NEW)).shape[1] == NEW
    assert current_length(model) == NEW
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        first(model, input_ids=tokens(NEW + 1))


@pytest.mark.parametrize("family", TABLES)
def test_a_checkpoint_keeps_the_longer_table(family, tmp_path):
    model = build(family)
    extend_positions(model, NEW)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert_same(
        {n: t for n, t in state(model).items() if n != "config"},
        {n: t for n, t in state(again).items() if n != "config"},
    )
    assert again.config.max_position_embeddings == model.config.max_position_embeddings
    assert_close(first(again, input_ids=tokens(NEW)), first(model, input_ids=tokens(NEW)), 1e-6)
    assert current_length(again) == NEW


@pytest.mark.parametrize("family", ["bert", "roberta", "bart", "gpt2"])
def test_interpolate_keeps_the_ends(family):
    table, kept = TABLES[family][3:]
    model = build(family)
    old = model.get_submodule(table).weight.detach().clone()
    extend_positions(model, 2 * OLD - 1, method="interpolate")
    new = model.get_submodule(table).weight.detach()
    assert torch.equal(new[: kept + 1], old[: kept + 1])
    assert torch.equal(new[-1], old[-1])
    assert_close(new[kept::2], old[kept:], 1e-6)
    assert_close(new[kept + 1 :: 2], (old[kept:-1] + old[kept + 1 :]) / 2, 1e-6)
    assert first(model, input_ids=tokens(2 * OLD - 1)).shape[1] == 2 * OLD - 1


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert", "mpnet"])
def test_the_padding_row_stays(family):
    model = build(family)
    extend_positions(model, NEW)
    assert model.config.max_position_embeddings == NEW + 2
    ids = tokens(NEW)[:, :30]
    padded = torch.cat([ids, torch.ones(2, NEW - 30, dtype=torch.long)], 1)
    mask = (padded != 1).long()
    got = first(model, input_ids=padded, attention_mask=mask)[:, :30]
    assert_close(got, first(model, input_ids=ids, attention_mask=torch.ones_like(ids)), 1e-5)


def test_bart_extends_encoder_and_decoder():
    model = build("bart")
    report = extend_positions(model, NEW)
    assert {"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"} <= set(report.changed)
    assert model.model.encoder.max_source_positions == NEW
    out = first(model, input_ids=tokens(NEW), decoder_input_ids=tokens(NEW))
    assert out.shape == (2, NEW, 40)


def test_gpt2_is_causal_beyond_the_old_length_and_names_its_own_field():
    model = build("gpt2")
    assert extend_positions(model, NEW).changed == ("transformer.wpe.weight", "config.max_position_embeddings")
    assert model.config.n_positions == NEW
    ids = tokens(NEW)
    changed = ids.clone()
    changed[:, -1] = 3
    assert torch.equal(first(model, input_ids=ids)[:, :-1], first(model, input_ids=changed)[:, :-1])


def test_gpt_neo_masks_are_rebuilt():
    model = build("gpt-neo")
    extend_positions(model, NEW)
    local = model.transformer.h[1].attn.attention.bias[0, 0]
    assert local.shape == (NEW, NEW)
    assert local[30].nonzero().flatten().tolist() == [27, 28, 29, 30]


@pytest.mark.parametrize(
    ("cls", "config", "options", "table"),
    [
        (
            "DistilBertModel",
            "DistilBertConfig",
            {**DISTILBERT, "sinusoidal_pos_embds": True},
            "embeddings.position_embeddings",
        ),
        ("RoFormerModel", "RoFormerConfig", {**BERT, "embedding_size": 16}, "encoder.embed_positions"),
        ("MarianMTModel", "MarianConfig", BART, "model.encoder.embed_positions"),
    ],
)
def test_sinusoidal_tables_continue_their_formula(cls, config, options, table):
    model = make(cls, config, options)
    longer = make(cls, config, {**options, "max_position_embeddings": NEW})
    report = extend_positions(model, NEW)
    assert torch.equal(model.get_submodule(table).weight, longer.get_submodule(table).weight)
    assert "formula" in report.note
    extra = {"decoder_input_ids": tokens(NEW)} if cls.startswith("Marian") else {}
    assert first(model, input_ids=tokens(NEW), **extra).shape[1] == NEW


@pytest.mark.parametrize(
    ("cls", "config", "options"),
    [
        ("LlamaForCausalLM", "LlamaConfig", LLAMA),
        ("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": 8}),
        ("Qwen2ForCausalLM", "Qwen2Config", LLAMA),
        (
            "ModernBertForMaskedLM",
            "ModernBertConfig",
            {**BERT, "cls_token_id": 0, "sep_token_id": 2, "local_attention": 8},
        ),
        ("GPTJForCausalLM", "GPTJConfig", {**GPT2, "rotary_dim": 4}),
    ],
)
def test_rotary_models_only_raise_their_limit(cls, config, options, tmp_path):
    model = make(cls, config, options)
    before = {n: p.clone() for n, p in model.named_parameters()}
    short = first(model, input_ids=tokens(OLD))
    report = extend_positions(model, NEW)
    assert "frequencies unchanged" in report.note
    assert model.config.max_position_embeddings == NEW == current_length(model)
    assert all(m.max_seq_len_cached == NEW for m in model.modules() if hasattr(m, "max_seq_len_cached"))
    assert_same(before, dict(model.named_parameters()))
    assert torch.equal(first(model, input_ids=tokens(OLD)), short)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert_close(first(again, input_ids=tokens(NEW)), first(model, input_ids=tokens(NEW)), 1e-6)


def test_models_without_a_limit_are_refused():
    t5 = make(
        "T5Model", "T5Config", {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    )
    assert current_length(t5) is None
    with pytest.raises(UnsupportedModelError, match="neither a table of positions"):
        extend_positions(t5, NEW)


def rope(**scaling) -> dict:
    return {**LLAMA, "rope_parameters": {"rope_theta": 10000.0, **scaling}}


REFUSED = {
    "dynamic rope": ("LlamaModel", "LlamaConfig", rope(rope_type="dynamic", factor=2.0), "dynamic rope"),
    "yarn by length": (
        "LlamaModel",
        "LlamaConfig",
        rope(rope_type="yarn", factor=None, original_max_position_embeddings=8),
        "attention_scaling",
    ),
    "deberta": (
        "DebertaV2Model",
        "DebertaV2Config",
        {**BERT, "relative_attention": True, "position_biased_input": False},
        "rel_embeddings",
    ),
    "canine": (
        "CanineModel",
        "CanineConfig",
        {**BERT, "num_hash_buckets": 16, "num_hash_functions": 2},
        "char_position_embeddings",
    ),
    "beit": ("BeitModel", "BeitConfig", {**VIT, "use_relative_position_bias": True}, "neither a table"),
    "beit both": (
        "BeitModel",
        "BeitConfig",
        {**VIT, "use_relative_position_bias": True, "use_absolute_position_embeddings": True},
        "relative_position_bias",
    ),
    "swin": (
        "SwinModel",
        "SwinConfig",
        {"image_size": 32, "embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 2},
        "neither a table",
    ),
    "yolos": (
        "YolosModel",
        "YolosConfig",
        {**VIT, "image_size": [32, 32], "num_detection_tokens": 1},
        "position_embeddings",
    ),
    "reformer": (
        "ReformerModel",
        "ReformerConfig",
        {
            **BERT,
            "axial_pos_shape": [4, 4],
            "axial_pos_embds_dim": [8, 8],
            "attn_layers": ["local"],
            "is_decoder": True,
        },
        "position_embeddings.weights",
    ),
    "vivit": ("VivitModel", "VivitConfig", {**VIT, "tubelet_size": [2, 8, 8], "num_frames": 4}, "position_embeddings"),
    "siglip2": ("Siglip2VisionModel", "Siglip2VisionConfig", {**VIT, "num_patches": 16}, "position_embedding"),
    "clip": ("CLIPModel", "CLIPConfig", {"text_config": BERT, "vision_config": VIT}, "composed of parts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_stays_untouched(name):
    cls, config, options, message = REFUSED[name]
    model = make(cls, config, options)
    before = state(model)
    with pytest.raises(UnsupportedModelError, match=message) as error:
        extend_positions(model, NEW)
    assert "\n" not in str(error.value)
    assert_same(before, state(model))


@pytest.mark.parametrize("bad", [0, -3, 20.0, "32", True, None])
def test_bad_lengths_are_refused(bad):
    with pytest.raises(ConfigError, match="whole number"):
        extend_positions(build("bert"), bad)


def test_smaller_equal_and_unknown_method():
    model = build("roberta")
    before = state(model)
    with pytest.raises(ConfigError, match=f"got 8, but the model already takes {OLD}; choose a larger one or leave"):
        extend_positions(model, 8)
    with pytest.raises(UnknownNameError, match="Did you mean 'tile'"):
        extend_positions(model, NEW, method="tiles")
    report = extend_positions(model, OLD)
    assert (report.changed, report.old_length, report.new_length) == ((), OLD, OLD)
    assert_same(before, state(model))


def test_config_and_weights_that_disagree_are_refused():
    model = build("bert")
    model.config.max_position_embeddings = 12
    with pytest.raises(UnsupportedModelError, match=r"shape \(16, 16\), expected \(12, 16\)"):
        extend_positions(model, NEW)
    assert model.bert.embeddings.position_embeddings.weight.shape == (16, 16)


@pytest.mark.parametrize("method", ["tile", "interpolate"])
def test_dtype_grad_and_ties_are_kept(method):
    model = build("bert").to(torch.bfloat16)
    model.requires_grad_(False)
    model.bert.embeddings.position_embeddings.weight.requires_grad_(True)
    extend_positions(model, NEW, method=method)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["bert.embeddings.position_embeddings.weight"]
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    frozen = build("bert").requires_grad_(False)
    extend_positions(frozen, NEW, method=method)
    assert not any(p.requires_grad for p in frozen.parameters())


def test_random_state_is_left_alone():
    model = build("bert")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    extend_positions(model, NEW)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("family", IMAGES)
def test_images_match_the_interpolation_of_transformers(family, tmp_path):
    extra = IMAGES[family][3]
    model = build(family)
    with torch.no_grad():  # DeiT and DINOv2 start from zeros
        for name, p in model.named_parameters():
            if "position" in name:
                p.normal_()
    reference = copy.deepcopy(model)
    assert current_length(model) == 16 + extra
    report = extend_positions(model, 37 + extra)  # 7 x 7 patches are the smallest square
    assert (report.old_length, report.new_length, report.image_size) == (16 + extra, 49 + extra, (56, 56))
    assert current_length(model) == 49 + extra
    assert model.config.image_size in (56, [56, 56])
    pixels = torch.randn(2, 3, 56, 56)
    got = first(model, pixel_values=pixels)
    flag = {} if "dinov2" in family or "beit" in family else {"interpolate_pos_encoding": True}
    assert_close(got, first(reference, pixel_values=pixels, **flag), 1e-5)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert_close(first(again, pixel_values=pixels), got, 1e-6)
    if "dinov2" not in family and "beit" not in family:
        with pytest.raises((ValueError, RuntimeError), match="match"):
            first(model, pixel_values=torch.randn(1, 3, 32, 32))


def test_bf16_images_are_interpolated_in_fp32():
    full, half = build("vit"), build("vit").to(torch.bfloat16)
    full.vit.embeddings.position_embeddings.data = full.vit.embeddings.position_embeddings.data.bfloat16().float()
    extend_image_size(full, 56)
    extend_image_size(half, 56)
    assert half.vit.embeddings.position_embeddings.dtype == torch.bfloat16
    assert torch.equal(
        half.vit.embeddings.position_embeddings, full.vit.embeddings.position_embeddings.to(torch.bfloat16)
    )


def test_rectangular_images(tmp_path):
    model = build("vit")
    report = extend_image_size(model, (32, 64))
    assert (report.new_length, report.image_size) == (33, (32, 64))
    pixels = torch.randn(1, 3, 32, 64)
    got = first(model, pixel_values=pixels)
    model.save_pretrained(tmp_path)
    assert_close(first(type(model).from_pretrained(tmp_path).eval(), pixel_values=pixels), got, 1e-6)
    assert extend_image_size(model, (64, 64)).image_size == (64, 64)
    assert first(model, pixel_values=torch.randn(1, 3, 64, 64)).shape == (1, 2)


@pytest.mark.parametrize("family", ["dinov2", "clip-vision"])
def test_rectangular_images_are_refused_where_the_table_is_square(family):
    model = build(family)
    before = state(model)
    with pytest.raises(UnsupportedModelError):
        extend_image_size(model, (32, 64))
    assert_same(before, state(model))


@pytest.mark.parametrize("bad", [24, 60, (64, 24), "64", (64, 64, 64), 0, 64.0])
def test_bad_image_sizes_are_refused(bad):
    model = build("vit")
    before = state(model)
    with pytest.raises(ConfigError, match="got"):
        extend_image_size(model, bad)
    with pytest.raises(ConfigError, match="already takes 17"):
        extend_positions(model, 16)
    assert extend_positions(model, 17).changed == ()
    assert_same(before, state(model))


def test_an_image_model_without_a_known_size_is_refused():
    model = build("vit")
    model.config.image_size = [32, 32, 32]
    assert current_length(model) is None
    with pytest.raises(UnsupportedModelError, match="neither a table"):
        extend_positions(model, 50)


def test_image_size_of_a_text_model_is_refused():
    with pytest.raises(UnsupportedModelError):
        extend_image_size(build("bert"), 64)


def tiny_timm(**extra):
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 12, "num_heads": 2, **extra}
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, **options).eval()


def test_timm():
    model = tiny_timm(num_classes=3)
    assert current_length(model) == 17
    old = model.pos_embed.detach().clone()
    report = extend_positions(model, 40)
    assert (report.new_length, report.changed, report.image_size) == (50, ("pos_embed",), (56, 56))
    assert torch.equal(model.pos_embed[:, :1], old[:, :1])
    assert model(torch.randn(1, 3, 56, 56)).shape == (1, 3)
    with pytest.raises(ConfigError, match="multiples"):
        extend_image_size(model, 60)


def test_timm_wrapper_comes_back_at_the_new_size(tmp_path):
    args = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 12, "num_heads": 2}
    config = tf.TimmWrapperConfig(
        architecture="vit_tiny_patch16_224",
        model_args=args,
        num_labels=3,
        pretrained_cfg={"input_size": [3, 32, 32], "crop_pct": 0.9},
    )
    model = tf.TimmWrapperForImageClassification(config).eval()
    report = extend_image_size(model, (56, 56))
    assert report.changed[0] == "timm_model.pos_embed"
    pixels = torch.randn(1, 3, 56, 56)
    got = first(model, pixel_values=pixels)
    model.save_pretrained(tmp_path)
    again = tf.TimmWrapperForImageClassification.from_pretrained(tmp_path).eval()
    assert_close(first(again, pixel_values=pixels), got, 1e-6)
    processor = tf.TimmWrapperImageProcessor(
        {"input_size": [3, 32, 32], "crop_pct": 0.9}, architecture="vit_tiny_patch16_224"
    )
    extend_processor(processor, report, model)
    assert processor(image())["pixel_values"].shape == (1, 3, 56, 56)
    assert processor.data_config["crop_pct"] == 0.9


def test_timm_models_that_cannot_be_resized_are_refused():
    for name in ("resnet18", "mixer_s32_224"):
        with pytest.raises(UnsupportedModelError):
            extend_positions(timm.create_model(name, pretrained=False), 400)


def image():
    from PIL import Image

    return Image.new("RGB", (80, 70), (200, 10, 10))


def tokenizer():
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "[PAD]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", model_max_length=OLD
    )


def test_tokenizer(tmp_path):
    model, tok = build("bert"), tokenizer()
    assert extend_processor(tok, extend_positions(model, NEW), model) is tok
    tok.save_pretrained(tmp_path)
    again = tf.AutoTokenizer.from_pretrained(tmp_path)
    assert tok.model_max_length == again.model_max_length == NEW
    assert len(again("a " * 100, truncation=True)["input_ids"]) == NEW
    assert extend_processor(tok, 77, model).model_max_length == 77


@pytest.mark.parametrize("stored", ["padded to a length", "padded to the longest", "changed by a call"])
@pytest.mark.parametrize("length", [OLD, NEW])
def test_readers_without_python_read_the_new_length(tmp_path, length, stored):
    """tokenizer.json kept the original's truncation (MiniLM's: 128 of its 512), so they cut texts without a word."""
    from tokenizers import Tokenizer

    model, tok = build("bert"), tokenizer()
    tok.backend_tokenizer.enable_truncation(OLD - 3, stride=1)
    tok.backend_tokenizer.enable_padding(length=None if "longest" in stored else OLD - 3, pad_token="[PAD]")
    tok.save_pretrained(tmp_path / "original")
    tok = tf.AutoTokenizer.from_pretrained(tmp_path / "original")
    if "call" in stored:
        # What a call asks for stays in the tokenizer's own settings until the next call.
        tok("a a a", truncation=True, max_length=2)
    files = {"modules.json": "[]", "sentence_bert_config.json": '{"max_seq_length": 7}'}
    model = linearize.convert(model, "elu", max_length=length)
    linearize.save(model, tmp_path / "saved", processor=tok, extra_files=files)
    # An export writes the checkpoint's own tokenizer.
    tf.AutoTokenizer.from_pretrained(tmp_path / "saved").save_pretrained(tmp_path / "onnx")
    for folder in ("saved", "onnx"):
        read = Tokenizer.from_file(str(tmp_path / folder / "tokenizer.json"))
        assert [len(read.encode(text).ids) for text in ("a " * 2 * NEW, "a a a")] == [length, 3]
        assert {len(one.ids) for one in read.encode_batch(["a a a", "a"])} <= {1, 3}
        numbers = json.loads((tmp_path / folder / "tokenizer_config.json").read_text())
        assert {numbers["model_max_length"], numbers.get("max_length", length)} == {length}
    assert json.loads((tmp_path / "saved" / "sentence_bert_config.json").read_text()) == {"max_seq_length": length}


@pytest.mark.parametrize(
    ("cls", "options", "size", "crop"),
    [
        ("ViTImageProcessor", {"size": {"height": 32, "width": 32}}, {"height": 56, "width": 56}, None),
        (
            "CLIPImageProcessor",
            {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
            {"shortest_edge": 56},
            {"height": 56, "width": 56},
        ),
        (
            "BitImageProcessor",
            {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}},
            {"shortest_edge": 70},
            {"height": 56, "width": 56},
        ),
        (
            "DeiTImageProcessor",
            {"size": {"height": 36, "width": 36}, "crop_size": {"height": 32, "width": 32}},
            {"height": 63, "width": 63},
            {"height": 56, "width": 56},
        ),
    ],
)
def test_image_processors(cls, options, size, crop, tmp_path):
    model, processor = build("vit"), getattr(tf, cls)(**options)
    extend_processor(processor, extend_image_size(model, 56), model)
    processor.save_pretrained(tmp_path)
    again = getattr(tf, cls).from_pretrained(tmp_path)
    for one in (processor, again):
        assert dict(one.size) == size
        assert crop is None or dict(one.crop_size) == crop
        assert one(image(), return_tensors="pt")["pixel_values"].shape == (1, 3, 56, 56)


def test_a_processor_of_two_takes_the_part_the_model_needs():
    pair = tf.CLIPProcessor(tf.CLIPImageProcessor(), tokenizer())
    vision, text = build("clip-vision"), build("clip-text")
    extend_processor(pair, extend_image_size(vision, 56), vision)
    assert (dict(pair.image_processor.size), pair.tokenizer.model_max_length) == ({"shortest_edge": 56}, OLD)
    extend_processor(pair, extend_positions(text, NEW), text)
    assert pair.tokenizer.model_max_length == NEW


def test_a_processor_of_the_wrong_kind_is_refused():
    with pytest.raises(ConfigError, match="expected the image_processor"):
        extend_processor(tokenizer(), 50, build("vit"))
    with pytest.raises(ConfigError, match="expected the tokenizer"):
        extend_processor(tf.ViTImageProcessor(), 50, build("bert"))


def test_save_lets_the_tokenizer_read_as_much_as_the_converted_model(tmp_path):
    """`truncation=True` of the saved tokenizer cut every text at the old length, in pipelines too."""
    model = linearize.convert(original("bert"), "elu", max_length=200)
    mine = tokenizer_for(64)
    linearize.save(copy.deepcopy(model), tmp_path / "long", processor=mine)
    saved = tf.AutoTokenizer.from_pretrained(tmp_path / "long")
    assert (saved.model_max_length, mine.model_max_length) == (200, 64)
    assert len(saved("cat " * 500, truncation=True)["input_ids"]) == 200
    linearize.save(linearize.convert(original("bert"), "elu"), tmp_path / "same", processor=mine)
    assert tf.AutoTokenizer.from_pretrained(tmp_path / "same").model_max_length == 64
    images = linearize.convert(original("vit"), "elu", max_length=65)
    side = images.config.image_size
    processors = [tf.ViTImageProcessor(size={"height": 8, "width": 8}), mine]
    linearize.save(images, tmp_path / "images", processor=processors)
    assert tf.AutoImageProcessor.from_pretrained(tmp_path / "images").size["height"] == side


def test_the_text_part_of_a_model_of_several_parts_has_a_length():
    """The export was checked on longer rows than CLIP reads, and stage one ran on them in an EncoderDecoderModel."""
    model = original("clip")
    assert current_length(model) is None and text_length(model) == 32
    assert text_length(original("roberta")) == current_length(original("roberta"))
