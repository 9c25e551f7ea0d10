"""timm models: wrapped, converted, saved, loaded as any transformers model; other kinds of attention are told apart."""

from __future__ import annotations

import json

import pytest
import torch
from support.tasks import no_rows
from support.tiny import outputs, stir
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    TimmWrapperConfig,
    ViTConfig,
    ViTModel,
)

import linearize
from linearize.attention.interface import linear_attentions
from linearize.checkpoint.loading import load_model
from linearize.conversion.timm import wrap
from linearize.core.errors import ConfigError, DataError, UnsupportedModelError
from linearize.fidelity import measure
from linearize.fidelity.teacher import run_body
from linearize.training.adapters import LoraConfig, adapter_files, add_lora
from linearize.training.stage_two.load import load_for_task
from linearize.training.stage_two.save import save_model

timm = pytest.importorskip("timm")

SMALL = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4}
MODELS = {
    "vit": ("vit_tiny_patch16_224", SMALL),
    "vit-no-class-token": ("vit_tiny_patch16_224", {**SMALL, "class_token": False, "global_pool": "avg"}),
    "vit-qk-norm": ("vit_tiny_patch16_224", {**SMALL, "qk_norm": True}),
    "vit-registers": ("vit_small_patch14_reg4_dinov2", {**SMALL, "img_size": 28}),
    "deit-distilled": ("deit_tiny_distilled_patch16_224", SMALL),
    "eva-rope": ("eva02_tiny_patch14_224", {**SMALL, "img_size": 28}),
    "dinov3-rope": ("vit_small_patch16_dinov3", SMALL),
    "siglip-pool": ("vit_base_patch16_siglip_224", SMALL),
    "test_vit": ("test_vit", {}),
    "test_vit4": ("test_vit4", {}),
}

COMPILED = ("eva-rope",)
"""With rotations; to trace the others is left to `make slow`."""


def bare(name: str, classes: int = 5):
    architecture, arguments = MODELS[name]
    torch.manual_seed(0)
    model = timm.create_model(architecture, pretrained=False, num_classes=classes, **arguments).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Fresh timm weights are so small that every attention is uniform.
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model, dict(arguments)


def images(model, batch: int = 3):
    return {"pixel_values": torch.randn(batch, *model.config.pretrained_cfg["input_size"])}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * n.startswith("test_")) for n in MODELS])
def test_convert_save_load(name, tmp_path):
    model, arguments = bare(name)
    wrapped = wrap(model, arguments)
    pixels = images(wrapped)
    softmax = outputs(wrapped, pixels)[0]
    with torch.no_grad():
        torch.testing.assert_close(model(pixels["pixel_values"]), softmax, rtol=0, atol=0)
    plan = linearize.plan(wrapped)
    linearize.apply(wrapped, plan)
    stir(wrapped)
    layers = linear_attentions(wrapped)
    assert len(layers) == len(plan.converted) == len(wrapped.timm_model.blocks)
    linear = outputs(wrapped, pixels)[0]
    assert (linear - softmax).abs().max() > 1e-4
    linearize.save(wrapped, tmp_path / "out")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(outputs(loaded, pixels)[0], linear, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in COMPILED)) for n in MODELS])
def test_compiled(name):
    model, arguments = bare(name)
    converted = linearize.convert(wrap(model, arguments))
    pixels = images(converted)
    compiled = torch.compile(converted, fullgraph=True, backend="eager")
    torch.testing.assert_close(outputs(compiled, pixels)[0], outputs(converted, pixels)[0], rtol=0, atol=2e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "heads"), [("vit", {"head"}), ("deit-distilled", {"head", "head_dist"})])
def test_low_rank_updates_train_the_head_inside(name, heads):
    """The embedding of images has no single weight, so `--lora` was a traceback for every image model."""
    model = linearize.convert(wrap(*bare(name)))
    add_lora(model, LoraConfig(r=2))
    trained = {n for n, parameter in model.named_parameters() if parameter.requires_grad and "lora_" not in n}
    kernels = {n for n in trained if ".linear_attention." in n}
    assert kernels and trained - kernels == {f"timm_model.{h}.{n}" for h in heads for n in ("weight", "bias")}
    files = adapter_files(model, LoraConfig(r=2), "base")
    asked = json.loads(files["adapter_config.json"])["modules_to_save"]
    assert {n for n in asked if "linear_attention" not in n} == {f"timm_model.{h}" for h in heads}
    assert b"timm_model.patch_embed" not in files["adapter_model.safetensors"][:20_000]


def test_pooling_attention_stays(tmp_path):
    model, arguments = bare("siglip-pool")
    plan = linearize.plan(wrap(model, arguments))
    (kept,) = [layer for layer in plan.layers if not layer.converted]
    assert kept.reason.startswith("cross-attention")


TNT = {"img_size": 32, "embed_dim": 32, "inner_dim": 16, "depth": 1, "num_heads_outer": 2, "num_heads_inner": 2}
TWINS = {
    "img_size": 64,
    "embed_dims": (16, 16, 32, 32),
    "num_heads": (2, 2, 2, 2),
    "depths": (1, 1, 1, 2),
    "wss": (7, 7, 7, 7),
}
CONVIT = {"img_size": 32, "embed_dim": 8, "depth": 3, "num_heads": 4, "local_up_to_layer": 1}
SHVIT = {"embed_dim": (16, 32, 48), "depth": (1, 1, 1), "partial_dim": (8, 16, 24), "types": ("s", "s", "s")}


@pytest.mark.parametrize(
    ("name", "arguments", "count"),
    [("tnt_s_patch16_224", TNT, 2), ("shvit_s1", SHVIT, 3), ("convit_tiny", CONVIT, 2)],
    ids=["tnt", "shvit", "convit"],
)
def test_plain_attention_that_writes_softmax_out_is_reached(name, arguments, count, tmp_path):
    """It is converted as what calls torch's function, which conversion holds against the original."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **arguments).eval()
    pixels = {"pixel_values": torch.randn(2, 3, 64 if name.startswith("shvit") else 32, 64 if "shvit" in name else 32)}
    wrapped = wrap(model, arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
        softmax = model(pixels["pixel_values"])
    assert len(linearize.plan(wrapped, example_inputs=pixels).converted) == count
    with torch.no_grad():
        # The trial run leaves the model as it was.
        torch.testing.assert_close(model(pixels["pixel_values"]), softmax, rtol=0, atol=0)
    linearize.convert(wrapped, example_inputs=pixels)
    linear = outputs(wrapped, pixels)[0]
    assert (linear - softmax).abs().max() > 1e-5
    linearize.save(wrapped, tmp_path / "out")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(outputs(loaded, pixels)[0], linear, rtol=0, atol=2e-6)


def test_windows_as_a_fifth_dimension_stay():
    model = wrap(timm.create_model("twins_svt_small", num_classes=3, **TWINS), TWINS)
    pixels = {"pixel_values": torch.randn(1, 3, 64, 64)}
    plan = linearize.plan(model, example_inputs=pixels)
    kept = [layer.reason for layer in plan.layers if not layer.converted]
    assert "attention inside windows of an image, which is already linear in their number" in kept
    linearize.convert(model, example_inputs=pixels)
    assert outputs(model, pixels)[0].isfinite().all()


def test_observer_sees_queries_after_norm_and_rotation():
    model, arguments = bare("eva-rope")
    wrapped = wrap(model, arguments)
    pixels = images(wrapped)
    before = outputs(wrapped, pixels)[0]
    linearize.convert(wrapped)
    seen = []
    for layer in linear_attentions(wrapped).values():
        layer.observer = lambda layer, q, k, v, mask, scaling: seen.append((q.shape, mask, scaling))
    torch.testing.assert_close(outputs(wrapped, pixels)[0], before, rtol=0, atol=2e-6)
    assert seen == [(torch.Size([3, 4, 5, 8]), None, 8**-0.5)] * 2


def test_bare_model_is_wrapped_by_convert(tmp_path):
    model = timm.create_model("test_vit", pretrained=False, num_classes=4, img_size=64)
    converted = linearize.convert(model)
    assert type(converted).__qualname__ == "LinearizedTimmWrapperForImageClassification"
    assert converted.timm_model is model
    # The original may be bare in `measure`, too.
    again = timm.create_model("test_vit", pretrained=False, num_classes=4, img_size=64)
    assert measure(again, converted, [{"pixel_values": torch.zeros(1, 3, 64, 64)}]).queries > 1
    linearize.save(converted, tmp_path / "out")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert loaded.config.num_labels == 4
    assert outputs(loaded, {"pixel_values": torch.zeros(1, 3, 64, 64)})[0].shape == (1, 4)


def test_arguments_of_create_model_that_are_not_known_are_asked_for():
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, **SMALL)
    with pytest.raises(ConfigError, match="model_args"):
        wrap(model)
    wrapped = wrap(model, {**SMALL, "num_classes": 1000})  # as it was given to `create_model`
    assert wrapped.config.num_labels == 1000
    assert wrapped.config.model_args == SMALL


@pytest.mark.parametrize(
    "more",
    [{"global_pool": "avg", "fc_norm": False}, {"num_classes": 0, "global_pool": ""}, {"dynamic_img_size": True}],
)
def test_arguments_without_weights_are_saved_too(more, tmp_path):
    """The checkpoint loaded, but pooled like timm's default (other outputs by 100 %) or refused other sizes."""
    torch.manual_seed(0)
    arguments = {"img_size": 32, **more}
    told = ("global_pool", "dynamic_img_size")
    given = {key: value for key, value in arguments.items() if key not in told}
    model = timm.create_model("vit_tiny_patch16_224", **arguments).eval()
    converted = linearize.convert(wrap(model, given), kernel="elu")
    linearize.save(converted, tmp_path / "out")
    auto = AutoModel if model.num_classes == 0 else AutoModelForImageClassification
    loaded = auto.from_pretrained(tmp_path / "out").eval()
    pixels = torch.randn(2, 3, 32, 48 if "dynamic_img_size" in more else 32)
    with torch.no_grad():
        expected, found = converted(pixels), loaded(pixels)
    name = "logits" if model.num_classes else "pooler_output"
    torch.testing.assert_close(found[name], expected[name], rtol=0, atol=2e-6)


def test_an_argument_that_changes_layers_alone_is_asked_for():
    """With ReLU the loaded checkpoint had timm's GELU: logits differed by 0.56."""
    model = timm.create_model("test_vit", act_layer="relu")
    with pytest.raises(ConfigError, match=r"act is ReLU\(\), but timm builds GELU.*model_args"):
        wrap(model)
    assert wrap(model, {"act_layer": "relu"}).config.model_args["act_layer"] == "relu"
    # Only training reads these.
    wrap(timm.create_model("test_vit", drop_path_rate=0.1, drop_rate=0.1))


def test_images_with_one_channel(tmp_path):
    model = linearize.convert(timm.create_model("test_vit", in_chans=1, num_classes=5))
    linearize.save(model, tmp_path / "out")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert images(loaded)["pixel_values"].shape == (3, 1, 160, 160)
    assert outputs(loaded, images(loaded))[0].shape == (3, 5)


def test_no_classifier_gives_the_base_model(tmp_path):
    model = linearize.convert(timm.create_model("test_vit", pretrained=False, num_classes=0))
    linearize.save(model, tmp_path / "out")
    loaded = AutoModel.from_pretrained(tmp_path / "out")
    pixels = images(loaded)
    assert outputs(loaded, pixels)[0].shape[0] == 3


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet18", {}, "not a Transformer"),
        ("levit_128s", {}, "Attention adds a position bias"),
        ("xcit_nano_12_p16_224", {}, "attention between channels"),
        ("beit_base_patch16_224", SMALL, "additive bias"),
        ("cait_xxs24_224", {}, "TalkingHeadAttn mixes the scores of its heads"),
    ],
)
def test_what_cannot_be_converted_says_why(name, arguments, message):
    model = timm.create_model(name, pretrained=False, num_classes=5, **arguments)
    with pytest.raises(UnsupportedModelError, match=message):
        linearize.plan(wrap(model, arguments))


def test_pipeline_and_processor_from_the_folder(tmp_path):
    from PIL import Image
    from transformers import pipeline

    model = linearize.convert(timm.create_model("test_vit", pretrained=False, num_classes=5))
    linearize.save(model, tmp_path / "out")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert type(processor).__name__ == "TimmWrapperImageProcessor"
    classify = pipeline("image-classification", model=str(tmp_path / "out"))
    found = classify(Image.new("RGB", (200, 150), (200, 30, 30)))
    assert len(found) == 5
    assert sum(one["score"] for one in found) == pytest.approx(1, abs=1e-5)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["pretrained_cfg"]["input_size"] == [3, 160, 160]


def test_local_timm_folder(tmp_path):
    """A folder as timm's own push writes it: its config.json has `architecture` and no `model_type`."""
    from safetensors.torch import save_file

    model = timm.create_model("test_vit", pretrained=False, num_classes=5).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    values = {"architecture": "test_vit", "num_classes": 5, "pretrained_cfg": {"input_size": [3, 160, 160]}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert isinstance(loaded.config, TimmWrapperConfig)
    # The loader of the command line keeps the classifier too.
    assert type(load_model(str(tmp_path)).model) is type(loaded)
    linearize.convert(loaded)
    # What stage one runs.
    assert run_body(loaded, {"pixel_values": torch.zeros(1, 3, 160, 160), "labels": torch.tensor([1])})[0].shape == (
        1,
        5,
    )
    linearize.save(loaded, tmp_path / "out")
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert len(linear_attentions(again)) == len(model.blocks)


def test_images_of_a_size_that_the_model_refuses_are_one_line():
    """A processor with another size than the model ended in a traceback, after the data was read."""
    model = wrap(timm.create_model("vit_tiny_patch16_224", **SMALL), SMALL)
    with pytest.raises(DataError, match=r"pixel_values \[1, 3, 96, 96\]: Input height \(96\).*--image-size"):
        run_body(linearize.convert(model), {"pixel_values": torch.zeros(1, 3, 96, 96)})
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    vit = ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8))
    with pytest.raises(DataError, match=r"Input image size \(64\*64\).*--image-size"):
        run_body(linearize.convert(vit), {"pixel_values": torch.zeros(1, 3, 64, 64)})


def test_a_folder_that_timm_wrote_with_its_arguments(tmp_path):
    """`save_for_hf` writes all arguments of `create_model` down, also those that transformers gives itself."""
    from timm.models import save_for_hf

    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes).eval()
    save_for_hf(model, tmp_path / "timm", model_args={**sizes, "num_classes": 5}, safe_serialization=True)
    loaded = load_model(str(tmp_path / "timm")).model
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded(pixels).logits, model(pixels))
    made = linearize.convert(loaded, kernel="hedgehog").eval()
    linearize.save(made, tmp_path / "out")
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(again(pixels).logits, made(pixels).logits)
    assert len(linear_attentions(again)) == 2


def test_a_classifier_of_timm_is_tuned_on_other_classes(tmp_path):
    """Its config is written with other names: a new head kept its 5 outputs, and a tuned model counted as one of 2."""
    from timm.models import save_for_hf

    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **SMALL)
    save_for_hf(model, tmp_path / "timm", model_args=SMALL, safe_serialization=True)
    three = no_rows("image-classification", labels=("cat", "dog", "horse"))
    with pytest.raises(ConfigError, match="a trained head with 5 labels, but task image-classification has 3"):
        load_for_task(str(tmp_path / "timm"), three)
    tuned = load_for_task(str(tmp_path / "timm"), three, new_head=True)
    for folder, made in (("tuned", tuned), ("linear", linearize.convert(tuned))):
        save_model(made, tmp_path / folder, None, stage={})
        again = load_for_task(str(tmp_path / folder), three)
        assert again.config.id2label == {0: "cat", 1: "dog", 2: "horse"}
        with torch.no_grad():
            assert again.eval()(torch.zeros(1, 3, 32, 32)).logits.shape == (1, 3)
    two = no_rows("image-classification", labels=("bird", "fish"))
    save_model(load_for_task(str(tmp_path / "tuned"), two, new_head=True), tmp_path / "two", None, stage={})
    assert AutoModelForImageClassification.from_pretrained(tmp_path / "two").config.id2label == {0: "bird", 1: "fish"}


def test_other_resolution_than_trained(tmp_path):
    model = wrap(timm.create_model("test_vit", pretrained=False, num_classes=5))
    from linearize.conversion.positions import current_length, extend_positions

    longer = extend_positions(model, 2 * current_length(model))
    linearize.convert(model)
    linearize.save(model, tmp_path / "out")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert outputs(loaded, {"pixel_values": torch.zeros(1, 3, *longer.image_size)})[0].shape == (1, 5)
