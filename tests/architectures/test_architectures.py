"""Architectures that worked in the last sweep still work, and the page says what the sweep found."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from architectures.shrink import tiny_config, tiny_model
from architectures.sweep import apart, modeling_files, tell, try_one
from architectures.table import RESULTS, ROOT, by_name, page
from architectures.trial import _Trial, build, example_inputs, softmax_left, try_model
from support.forks import run
from torch.overrides import TorchFunctionMode

import linearize
from linearize.conversion.attentions import plan_names, trial_runs
from linearize.core.errors import CheckpointError, UnsupportedModelError

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
    "laguna cohere_asr step3p7 deepseek_ocr2 jamba",
    "vit_mae clip dinov3_vit wav2vec2",
    "mixtral qwen2_moe deepseek_v3 dbrx solar_open modernbert timesfm gpt_neox",
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
        ("kimi_k25", "Kimi_K25VisionAttention", "did not run in the trial run"),
        ("siglip2", "MultiheadAttention", "its own attention code"),
        ("qwen3_asr", "Qwen3ASRAudioAttention", "did not run in the trial run"),
        ("minimax", "MiniMaxLightningAttention", "its own attention code"),
        ("phi4_multimodal", "Phi4MultimodalVisionAttention", "without a mask it reads its tokens causally"),
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


class _Attends(TorchFunctionMode):
    """Records in which module each attention of a forward is computed, whatever its class."""

    def __init__(self, model):
        super().__init__()
        self.model, self.stack, self.names = model, [], set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        softmax = func in (torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax) and args[0].ndim == 4
        # Over the last axis: others choose pixels or channels.
        softmax = softmax and (args[1] if len(args) > 1 else (kwargs or {}).get("dim")) in (-1, 3)
        if softmax or func in (
            torch.nn.functional.scaled_dot_product_attention,
            torch.nn.functional.multi_head_attention_forward,
        ):
            self.names.add(self.stack[-1])
        return func(*args, **(kwargs or {}))

    def run(self, part, inputs):
        handles = []
        for name, module in self.model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self.stack.append(name)))
            handles.append(module.register_forward_hook(lambda *_: self.stack.pop() and None, always_call=True))
        # Without it, PyTorch's own attention may run as one operation.
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.no_grad(), self:
                part(**inputs)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for handle in handles:
                handle.remove()


MIXES_STREAMS = "_hc"
"""End of the names of hyper-connections: they mix residual streams of one token with softmax weights."""


def _missing(model, plan, runs):
    """List modules that attend and stand in no line of a plan."""
    watch = _Attends(model)
    for part, inputs in runs:
        watch.run(part, inputs)
    prefix = next((f"{name}." for name, one in model.named_modules() if one is model.base_model and name), "")
    listed = [x.module.removeprefix("../") if not x.in_body else f"{prefix}{x.module}" for x in plan.layers]
    return {
        name
        for name in watch.names
        if not name.endswith(MIXES_STREAMS)
        and not any(f"{name}.".startswith(f"{one}.") or one.startswith(f"{name}.") for one in listed)
    }


HEADS = (
    "clipseg detr siglip2 git aimv2",
    "maskformer sam2 blip_2 vit d_fine xcodec2 pix2struct eomt deepseek_ocr2 owlvit aria idefics2 t5gemma2 moshi",
)


@pytest.mark.parametrize(
    "names",
    [pytest.param(names, id=names.split()[0], marks=[pytest.mark.slow] * (names != HEADS[0])) for names in HEADS],
)
def test_every_module_that_attends_stands_in_the_plan(names):
    for name in names.split():
        model = build(f"{name}.modeling_{name}")
        plan = linearize.plan(model)
        assert not _missing(model, plan, trial_runs(model)[0]), name
        wanted = {id(one) for one in model.modules() if isinstance(one, torch.nn.MultiheadAttention)}
        names_of = plan_names(model)
        listed = {id(one) for one, known in names_of.items() if known in {layer.module for layer in plan.layers}}
        assert wanted <= listed, name


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_module_that_attends_stands_in_the_plan_of_every_model(part):
    broken = {}
    for result in [result for result in FOUND if result["status"] == "works" and "timm/" not in result["file"]][
        part::PARTS
    ]:
        inputs = example_inputs(result["file"])
        model = build(result["file"])
        plan = linearize.plan(model, local_as_full="--local-as-full" in result["message"], example_inputs=inputs)
        if missing := _missing(model, plan, trial_runs(model, inputs)[0]):
            broken[result["file"]] = sorted(missing)
    assert not broken


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("pix2struct", "encoder.encoder.layer.0.attention"),
        ("xcodec2", "acoustic_decoder.layers.0.self_attn"),
        ("deformable_detr", "decoder.layers.0.self_attn"),
        ("siglip2", "vision_model.encoder.layers.0.self_attn"),
        ("blip_2", "qformer.encoder.layer.0.attention.attention"),
        ("muse_glimmer", "vision_tower.layers.0.attn"),
        ("diffusion_gemma", "encoder.vision_tower.encoder.layers.0.self_attn"),
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


def test_a_softmax_tower_is_counted_apart():
    for name, left in {"clip": "", "git": "a part", "mllama": "a tower"}.items():
        model = build(f"{name}.modeling_{name}")
        assert softmax_left(model, linearize.plan(model)) == left, name
    found = [
        {"file": "x", "name": "x", "status": "works", "step": "", "message": "", "softmax": part}
        for part in ("", "a tower")
    ]
    assert page(found).startswith("### transformers\n\n2 models: 1 work, 1 work but keep a tower softmax.")


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
def test_what_worked_still_works(part, tmp_path):
    names = [result["file"] for result in FOUND if result["status"] == "works"][part::PARTS]
    broken = {}
    for name in names:
        # Each in a process of its own, which no other test has left anything in.
        done, path = run(tell, name, str(tmp_path / name)), tmp_path / name
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"status": "died"}
        if found["status"] != "works":
            broken[name] = found, done.stderr[-500:]
    assert not broken


@pytest.mark.parametrize("name", ["llama4", "qwen3_5"])
def test_a_class_of_a_part_alone_is_refused_in_one_line(name, tmp_path):
    model = linearize.convert(build(f"{name}.modeling_{name}"))
    linearize.save(model, tmp_path)
    for load in (
        lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path),
        lambda: transformers.AutoModelForCausalLM.from_config(model.config),
    ):
        with pytest.raises(CheckpointError, match=f"only a part of {type(model).__name__}, .* load it with an Auto"):
            load()


def test_a_window_that_begins_after_the_prompt_takes_the_option():
    model = build("unlimited_ocr.modeling_unlimited_ocr")
    with pytest.raises(UnsupportedModelError, match="--local-as-full"):
        linearize.plan(model, "hedgehog")
    assert len(linearize.plan(model, "hedgehog", local_as_full=True).local_as_full) == 2


def test_a_host_with_two_text_configs_trains_with_default_arguments():
    trial = _Trial(build("musicgen.modeling_musicgen"), None, lambda: build("musicgen.modeling_musicgen"))
    for step in (trial.plan, trial.convert, trial.gradients):
        step()
    assert trial.counts == (2, 4)


def test_weights_that_no_file_holds_are_not_called_damaged(tmp_path, monkeypatch):
    linearize.save(linearize.convert(build("videomae.modeling_videomae")), tmp_path)
    cls = transformers.VideoMAEForPreTraining
    built = cls.__init__

    def undefined(self, config):
        built(self, config)
        self._init_weights = lambda module: None

    monkeypatch.setattr(cls, "__init__", undefined)
    monkeypatch.setattr(torch, "empty_like", lambda x, **kwargs: torch.full_like(x, torch.nan, **kwargs))
    loaded = transformers.AutoModelForPreTraining.from_pretrained(tmp_path)
    assert bool(loaded.mask_token.isnan().all())
