"""Architectures that worked in the last sweep still work, and the page says what the sweep found."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from architectures.shrink import tiny_config, tiny_model
from architectures.sweep import apart, modeling_files, try_one
from architectures.table import RESULTS, ROOT, by_name, page
from architectures.trial import build, try_model

import linearize
from linearize.core.errors import CheckpointError

FOUND = json.loads(RESULTS.read_text(encoding="utf-8"))
PARTS = 24


@pytest.mark.parametrize(("name", "written"), [("models", by_name), ("sweep", page)])
def test_the_pages_are_what_was_found(name, written):
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert text.split(f"<!-- {name}: begin -->")[1].split(f"<!-- {name}: end -->")[0].strip() == written(FOUND)


def test_every_modeling_file_was_tried():
    known = {result["file"] for result in FOUND if not result["file"].startswith("timm/")}
    assert set(modeling_files()) <= known or transformers.__version__ != "5.24.0"
    assert all(set(result) >= {"file", "name", "model", "status", "step", "message"} for result in FOUND)


def test_the_rule_keeps_what_belongs_together():
    config = tiny_config(transformers.LlavaConfig)
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 32
    assert config.image_token_id < config.text_config.vocab_size == 128
    model = tiny_model(transformers.LlamaForCausalLM, tiny_config(transformers.LlamaConfig))
    assert sum(x.numel() for x in model.parameters()) < 100_000


RELOADED = (
    "laguna cohere_asr step3p7 deepseek_ocr2 mixtral qwen2_moe deepseek_v3 jamba dbrx solar_open",
    "vit_mae clip dinov3_vit modernbert timesfm wav2vec2 gpt_neox",
    "gpt2 bart molmo2 pixtral sam2 qwen3_vl whisper gemma4 siglip2 phi4_multimodal t5gemma2",
    "granitemoe phimoe minimax_m2 glm4_moe hy_v3 axk1 flex_olmo dots1 olmoe aria cohere2_moe mistral_large4",
    "vit hubert electra git",
)
MORE = RELOADED[2:]
"""Mixtures of experts and others like those of the first rows; left to `make slow`."""


@pytest.mark.parametrize(
    "names",
    [pytest.param(names, id=names.split()[0], marks=[pytest.mark.slow] * (names in MORE)) for names in RELOADED],
)
def test_a_load_gives_every_tensor_that_was_saved(names, tmp_path):
    """Those whose weights have other names in files than in the model, and one of each other kind."""
    for name in names.split():
        torch.manual_seed(0)
        model = linearize.convert(build(f"{name}.modeling_{name}"))
        linearize.save(model, tmp_path / name)
        loaded = type(model).from_pretrained(tmp_path / name).state_dict()
        saved = model.state_dict()
        assert saved.keys() == loaded.keys(), name
        assert not [key for key, x in saved.items() if not torch.equal(x, loaded[key])], name


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("siglip2", "Siglip2Attention", "did not run in the trial run"),
        ("siglip2", "MultiheadAttention", "its own attention code"),
        ("qwen3_asr", "Qwen3ASRAudioAttention", "did not run in the trial run"),
        ("minimax", "MiniMaxLightningAttention", "its own attention code"),
        ("phi4_multimodal", "Phi4MultimodalVisionAttention", "computes something else"),
    ],
)
def test_every_attention_stands_in_the_plan(name, kind, why):
    model = build(f"{name}.modeling_{name}")
    plan = linearize.plan(model)
    reasons = {layer.module: layer.reason for layer in plan.layers if not layer.converted}
    wanted = [name for name, one in model.base_model.named_modules() if type(one).__name__ == kind]
    assert wanted and set(wanted) <= reasons.keys() | {layer.module for layer in plan.converted}
    assert any(why in reasons.get(name, "") for name in wanted)
    assert linearize.Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("pix2struct", "encoder.encoder.layer.0.attention"),
        ("xcodec2", "acoustic_decoder.layers.0.self_attn"),
        ("deformable_detr", "decoder.layers.0.self_attn"),
    ],
)
def test_made_up_inputs_reach_attentions(name, module):
    plan = linearize.plan(build(f"{name}.modeling_{name}"))
    assert module in {layer.module for layer in plan.converted}


def test_a_host_with_a_generation_of_its_own():
    text = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16, "head_dim": 8, "global_head_dim": 8}
    config = tiny_config(
        transformers.DiffusionGemmaConfig, overrides={f"text_config.{key}": value for key, value in text.items()}
    )
    model = linearize.convert(tiny_model(transformers.DiffusionGemmaForBlockDiffusion, config))
    # It would compile itself for the first call, which takes longer than all the rest.
    assert len(model.generate(torch.arange(3, 10)[None], max_new_tokens=4, disable_compile=True)[0]) == 1


def test_the_sweep_tries_a_model():
    assert apart(lambda: try_one("bert.modeling_bert"), "bert", 60)["status"] == "works"


WHOLE = ("mistral", "axk1", "deepseek_vl_hybrid", "clip", "whisper", "gemma4_unified", "instructblip", "shieldgemma2")
"""Those with a window, a body that an Auto class builds, towers of other files, and classes that lack a part."""


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (i > 2)) for i, x in enumerate(WHOLE)])
def test_training_a_window_of_softmax_and_every_auto_class(name):
    result = try_one(f"{name}.modeling_{name}")
    assert result.status == "works", f"{result.step}: {result.message}"


def test_weights_that_a_class_computes_are_not_missed_by_another():
    config = tiny_config(transformers.MarianConfig)
    result = try_model("marian", lambda: tiny_model(transformers.MarianMTModel, config))
    assert result.status == "works", f"{result.step}: {result.message}"


def test_a_class_without_the_converted_attentions_says_so(tmp_path):
    linearize.save(linearize.convert(build("shieldgemma2.modeling_shieldgemma2")), tmp_path / "out")
    with pytest.raises(CheckpointError, match="attentions that the plan does not name"):
        transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    linearize.save(linearize.convert(build("bart.modeling_bart")), tmp_path / "bart")
    with pytest.raises(CheckpointError, match="BartForCausalLM reads other names, so they would be random"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bart")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_what_worked_still_works(part):
    names = [result["file"] for result in FOUND if result["status"] == "works"][part::PARTS]
    found = {name: apart(lambda name=name: try_one(name), name, 60) for name in names}
    broken = {name: f"{one['step']}: {one['message']}" for name, one in found.items() if one["status"] != "works"}
    assert not broken
