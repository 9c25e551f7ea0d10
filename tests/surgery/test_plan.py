"""What is found in a model, what becomes of it, and which of the cases it is when nothing can be done."""

import dataclasses
import inspect

import pytest
import torch
import transformers
from support.tiny import CONFIGS, converted, inputs_of, original, outputs

import linearize
from linearize.attention.interface import linear_attentions
from linearize.conversion.layers import ConversionConfig
from linearize.conversion.plan import expectations
from linearize.conversion.plan_file import apply_file, read_plan, write_plan
from linearize.core.errors import ConfigError, LinearizeError, UnknownNameError, UnsupportedModelError
from linearize.modeling.plan import Plan

KERNELS = ["hedgehog", "flexformer_s", "flexformer_n"]
EXPECTED = {
    # name: (converted, kept, heads, key heads, causal)
    "bert": (2, 0, 4, 4, False),
    "roberta": (2, 0, 4, 4, False),
    "distilbert": (2, 0, 4, 4, False),
    "gpt2": (2, 0, 4, 4, True),
    "vit": (2, 0, 4, 4, False),
    "deit": (2, 0, 4, 4, False),
    "llama": (2, 0, 4, 2, True),
    "modernbert": (2, 2, 4, 4, False),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_plan_finds_every_attention(name):
    count, kept, heads, key_heads, causal = EXPECTED[name]
    plan = linearize.plan(original(name))
    assert (len(plan.converted), len(plan.layers) - len(plan.converted)) == (count, kept)
    shape = plan.converted[0].shape
    assert (shape.heads, shape.key_heads, shape.head_dim, shape.causal) == (heads, key_heads, 8, causal)
    assert [layer.index for layer in plan.converted] == list(range(count))
    assert linearize.Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("name", ["bert", "clip"])
def test_the_callers_config_is_left_alone(name):
    """Another model can be built from it, and converted."""
    kind = getattr(transformers, CONFIGS[name][0])
    config = kind(**CONFIGS[name][1])
    model = transformers.AutoModel.from_config(config)
    before, parts = config.to_dict(), {id(one.config) for one in model.modules() if hasattr(one, "config")}
    linearize.convert(model, max_length=256 if name == "bert" else None)
    assert config.to_dict() == before and type(config) is kind
    assert not parts & {id(one.config) for one in model.modules() if hasattr(one, "config")}
    assert len(linear_attentions(linearize.convert(transformers.AutoModel.from_config(config)))) >= 2


def test_what_to_expect_of_signed_kernels():
    model = original("bert")
    one = expectations(linearize.plan(model, "flexformer_n", {"form": "paper"}))
    assert len(one) == 1 and one[0].startswith("flexformer_n: weights can be negative")
    assert one[0].endswith("; --kernel-arg form=positive avoids it")
    assert expectations(linearize.plan(model, "rfa"))[0].endswith("`linearize kernels` lists those")
    for kernel in ("flexformer_n", "flexformer_s", "hedgehog", "norm_elu"):
        assert expectations(linearize.plan(model, kernel)) == []


def test_local_layers_stay_and_say_why():
    plan = linearize.plan(original("modernbert"))
    reasons = {layer.reason for layer in plan.layers if not layer.converted}
    assert reasons == {"local attention (sliding window or chunks), already linear"}


def test_cross_attention_stays_and_says_so():
    plan = linearize.plan(original("bart"))
    kept = [layer for layer in plan.layers if not layer.converted]
    assert {layer.reason for layer in kept} == {"cross-attention"}
    assert len(kept) == 2
    assert [layer.shape.causal for layer in plan.converted] == [False, False, True, True]


def test_deformable_attention_is_listed():
    """Its inner module has the same name but no weights, so neither was listed: "2 of 2 attentions become linear"."""
    stages = ["stage2", "stage3", "stage4"]
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, out_features=stages, layer_type="basic"
    )
    config = transformers.DeformableDetrConfig(
        backbone_config=backbone, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_queries=7, num_feature_levels=3,
    )  # fmt: skip
    plan = linearize.plan(transformers.DeformableDetrForObjectDetection(config).eval())
    reason = "its own attention code (DeformableDetrMultiscaleDeformableAttention), which cannot be reached"
    assert {layer.module: layer.reason for layer in plan.layers} == {
        "decoder.layers.0.self_attn": "",
        "decoder.layers.1.self_attn": "",
        "encoder.layers.0.self_attn": reason,
        "decoder.layers.0.encoder_attn": reason,
        "decoder.layers.1.encoder_attn": reason,
    }


def test_planning_changes_nothing():
    model = original("gpt2", "AutoModelForCausalLM").train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    implementation = model.config._attn_implementation
    linearize.plan(model)
    assert model.training
    assert model.config._attn_implementation == implementation
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert "linearize_probe" not in transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.valid_keys()


@pytest.mark.sampled("values")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", EXPECTED)
def test_converted_model_differs_is_of_its_class_and_reloads(name, kernel, tmp_path):
    model = original(name)
    cls, inputs = type(model), inputs_of(model)
    before = outputs(model, inputs)[0]
    model = linearize.convert(model, kernel)
    assert isinstance(model, cls)
    after = outputs(model, inputs)[0]
    assert not torch.equal(before, after)
    linearize.save(model, tmp_path / "out")
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "out")
    aligned(loaded)
    assert torch.equal(after, outputs(loaded, inputs)[0])


def aligned(model):
    """Copy every weight to fresh memory: one that lies askew in a file's pages may be summed in another order."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.sampled("values")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in ("vit", "deit")])
def test_padded_batch_equals_unpadded_singles(name, kernel, side):
    model = converted(name, kernel=kernel)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 90, (1, n), generator=generator) for n in (11, 6, 9)]
    pad = model.config.get_text_config().pad_token_id or 0
    batch, mask = torch.full((3, 11), pad), torch.zeros(3, 11, dtype=torch.long)
    for i, row in enumerate(rows):
        part = slice(11 - row.shape[1], 11) if side == "left" else slice(0, row.shape[1])
        batch[i, part], mask[i, part] = row[0], 1
    extra = {}
    if side == "left":
        # Absolute positions count from the first token: what generate() hands over, and what these encoders take.
        extra["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        if name == "roberta":
            extra["position_ids"] = torch.where(mask == 1, mask.cumsum(-1) + pad, pad)
        if name == "distilbert":
            pytest.skip("DistilBERT's forward takes no position_ids, so left padding moves its positions by itself")
    together = outputs(model, {"input_ids": batch, "attention_mask": mask}, **extra)[0]
    for i, row in enumerate(rows):
        alone = outputs(model, {"input_ids": row})[0][0]
        real = together[i][mask[i].bool()]
        error = (real - alone).norm() / alone.norm()
        assert error < 1e-4


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_causal_models_do_not_see_the_future(name, kernel):
    model = converted(name, kernel=kernel)
    tokens = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(4))
    other = tokens.clone()
    other[:, 25:] = 7
    early, changed = outputs(model, {"input_ids": tokens})[0], outputs(model, {"input_ids": other})[0]
    torch.testing.assert_close(early[:, :25], changed[:, :25], rtol=0, atol=1e-6)
    assert not torch.allclose(early[:, 25:], changed[:, 25:])


def test_no_token_pair_matrix_is_built():
    """Peak of the tensors that a linear forward makes stays far below one T x T matrix of its heads."""
    model = converted("bert", config={"max_position_embeddings": 4096})
    tokens = torch.randint(3, 90, (1, 4096))
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(t))
            return out

    with torch.no_grad(), Watch():
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert max(sizes) < 4096 * 4096 / 8


def test_keep_softmax_keeps_exactly_those():
    model = converted("llama", "AutoModelForCausalLM", keep_softmax=[1])
    assert [name.split(".")[-2] for name in linear_attentions(model)] == ["0"]
    everything = linearize.plan(original("llama"), keep_softmax=[1])
    assert [layer.kernel for layer in everything.layers] == ["hedgehog", "softmax"]
    assert everything.layers[1].reason == "kept on request"


def test_kept_layers_compute_softmax():
    """A model whose first layer is kept has the same hidden states after it, padding and causality included."""
    model = original("gpt2")
    tokens = {"input_ids": torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(5))}
    tokens["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
    tokens["attention_mask"][0, :4] = 0
    with torch.no_grad():
        before = model(**tokens, output_hidden_states=True).hidden_states[1]
        after = linearize.convert(model, keep_softmax=[0])(**tokens, output_hidden_states=True).hidden_states[1]
    real = tokens["attention_mask"].bool()
    torch.testing.assert_close(before[real], after[real], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4), "bias"),
        (
            transformers.Gemma2Config(
                vocab_size=99,
                hidden_size=32,
                intermediate_size=37,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
            ),
            "soft cap",
        ),
        (
            transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4),
            "does not dispatch through transformers' AttentionInterface",
        ),
        (
            transformers.GptOssConfig(
                vocab_size=99,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                num_local_experts=2,
                num_experts_per_tok=1,
                layer_types=["full_attention", "full_attention"],
            ),
            "sinks",
        ),
        (transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]), "not a Transformer"),
    ],
    ids=["t5", "gemma2", "bloom", "gpt-oss", "resnet"],
)
def test_unsupported_models_say_which_case_it_is(config, words):
    model = transformers.AutoModel.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        linearize.convert(model)
    assert "\n" not in str(caught.value)
    assert linear_attentions(model) == {}


def test_everything_kept_and_converted_twice_are_errors():
    with pytest.raises(UnsupportedModelError, match=r"all 2 attentions .* kept as softmax"):
        linearize.convert(original("bert"), keep_softmax=[0, 1])
    with pytest.raises(UnsupportedModelError, match="already converted"):
        linearize.convert(converted("bert"))
    with pytest.raises(UnsupportedModelError, match="expected a transformers model"):
        linearize.convert(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kernel": "hedghog"}, UnknownNameError, "Did you mean 'hedgehog'"),
        ({"kernel_args": {"activatoin": "exp"}}, UnknownNameError, "Did you mean 'activation'"),
        ({"kernel_args": {"activation": "relu"}}, ConfigError, "expected one of softmax, exp"),
        (
            {"kernel": "flexformer_s", "kernel_args": {"frequencies": 0}},
            ConfigError,
            "expected a whole number from 1 to 4096",
        ),
        ({"kernel": "flexformer_s", "kernel_args": {"frequencies": "many"}}, ConfigError, "expected a whole number"),
        ({"keep_softmax": [2]}, ConfigError, "layer 2 does not exist: this model has 2"),
        (
            {"softmax_heads": {2: [0]}},
            ConfigError,
            "softmax-heads: layer 2 does not exist: this model has 2 that can be ",
        ),
        ({"softmax_heads": {0: [0, "1"]}}, ConfigError, "softmax-heads: got .* expected lists of numbers of heads"),
        ({"kernel_args": {"softmax_heads": 7}}, ConfigError, r"got \[7\], expected numbers of heads from 0 to 3"),
        (
            {"layers": {1: "diag_softmax"}, "softmax_heads": {0: [1], 1: [0]}},
            ConfigError,
            "layer 1 has kernel 'diag_softmax', whose heads cannot stay softmax",
        ),
        ({"seed": 2**63}, ConfigError, "conversion, seed: got 9223372036854775808, expected a whole number"),
        ({"max_length": 10}, ConfigError, "64"),
        ({"max_length": 128, "positions": "tiel"}, UnknownNameError, "tile"),
    ],
)
def test_bad_arguments_leave_the_model_alone(options, error, words):
    model = original("bert")
    inputs = inputs_of(model)
    before = outputs(model, inputs)[0]
    with pytest.raises(error, match=words) as caught:
        linearize.convert(model, **options)
    assert "\n" not in str(caught.value)
    assert type(model).__name__ == "BertModel"
    assert torch.equal(before, outputs(model, inputs)[0])


def test_every_tiny_model_can_be_planned():
    for name in CONFIGS:
        assert len(linearize.plan(original(name)).converted) >= 2


def test_max_length_takes_longer_inputs(tmp_path):
    model = linearize.convert(original("roberta"), max_length=300)
    assert model.config.max_position_embeddings == 302
    linearize.save(model, tmp_path / "out")
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "out")
    tokens = torch.randint(3, 90, (1, 300))
    assert outputs(loaded, {"input_ids": tokens})[0].shape == (1, 300, 32)


def test_options_of_convert_are_its_arguments():
    """Editors and `help` show them; a misspelt one gets the nearest."""
    shown = inspect.signature(linearize.convert).parameters
    assert list(shown) == ["model", *inspect.signature(ConversionConfig).parameters]
    assert shown["kernel"].default == "hedgehog" and shown["image_size"].default is None
    for verb in (linearize.convert, linearize.plan):
        with pytest.raises(UnknownNameError, match=r"unknown option .kernl.*Did you mean .kernel"):
            verb(original("bert"), kernl="elu")


def test_image_size_takes_larger_images():
    model = linearize.convert(original("vit"), "elu", image_size=40)
    assert model.config.image_size == 40
    assert model(torch.rand(1, 3, 40, 40))[0].shape == (1, 17, 32)
    with pytest.raises(ConfigError, match="max_length 9, which both set the size"):
        linearize.convert(original("vit"), image_size=40, max_length=9)
    with pytest.raises(UnsupportedModelError, match="reads no images; give max_length"):
        linearize.convert(original("bert"), image_size=40)


def test_cross_attention_of_equal_lengths_stays():
    model = original("bart", "AutoModelForSeq2SeqLM")
    ids = torch.arange(3, 9)[None]
    found = linearize.plan(model, example_inputs={"input_ids": ids, "decoder_input_ids": ids})
    kept = {layer.module: layer.reason for layer in found.layers if not layer.converted}
    assert kept == {f"decoder.layers.{i}.encoder_attn": "cross-attention" for i in range(2)}


def test_heads_that_look_up_are_in_the_plan_and_its_file(tmp_path):
    model, more = original("gpt2", "AutoModelForCausalLM"), {"window": 8, "routed_blocks": "2:4"}
    layers = {0: ("hedgehog", {**more, "routed_heads": (1, 3)}), 1: ("hedgehog", {**more, "routed_heads": "0+2"})}
    plan = linearize.plan(model, "elu", layers=layers)
    assert [layer.hybrid.routed_heads for layer in plan.converted][:2] == [(1, 3), (0, 2)]
    assert Plan.from_dict(plan.to_dict()) == plan
    write_plan(tmp_path / "plan.yaml", plan)
    assert "routed_heads:\n  - 1\n  - 3\n" in (tmp_path / "plan.yaml").read_text()
    assert apply_file(model, linearize.plan(model, "elu"), read_plan(tmp_path / "plan.yaml")) == plan
    with pytest.raises(ConfigError, match="routed-heads: got head 3, which keeps softmax"):
        linearize.plan(model, "elu", layers=layers, softmax_heads={0: [3]})


def test_sinks_are_in_the_plan_and_its_file(tmp_path):
    model = original("gpt2", "AutoModelForCausalLM")
    plan = linearize.plan(model, "hedgehog", window=8, sinks=4)
    assert [(layer.hybrid.window, layer.hybrid.sinks) for layer in plan.converted] == [(8, 4)] * len(plan.converted)
    assert Plan.from_dict(plan.to_dict()) == plan
    write_plan(tmp_path / "plan.yaml", plan)
    assert apply_file(model, linearize.plan(model, "elu"), read_plan(tmp_path / "plan.yaml")) == plan
    # As before there were any: an older version reads it.
    bare = linearize.plan(model, "hedgehog", window=8).to_dict()
    assert all("sinks" not in layer for layer in bare["layers"])
    one = linearize.plan(model, "elu", layers={0: ("hedgehog", {"window": 8, "sinks": 2})})
    assert [(layer.kernel, layer.hybrid.window, layer.hybrid.sinks) for layer in one.converted][:2] == [
        ("hedgehog", 8, 2),
        ("elu", None, 0),
    ]
    with pytest.raises(ConfigError, match="sinks: got 4 without a window"):
        linearize.plan(model, "hedgehog", sinks=4)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (None, "got a plan of type NoneType, expected one from linearize.plan"),
        ("gpt2", "the plan was made for another model, GPT2Model, not for this BertModel .it has no module"),
        ("wide", "not for this BertModel .attention_head_size is 16, but the model's is 8."),
        ("short", r"not for this BertModel \(it does not list 'encoder\.layer\.1\.attention\.self'\)"),
        ("edited", "unknown argument of kernel elu 'features'"),
        ("cut", r"numbers of the layers: got \[1\]"),
    ],
)
def test_a_plan_that_does_not_fit_leaves_the_model_as_it_was(plan, message):
    """The config was changed first: afterwards the model could be neither used as BERT nor converted."""
    model, wide, short = (
        original("bert", **changes) for changes in ({}, {"hidden_size": 64}, {"num_hidden_layers": 1})
    )
    made = {"gpt2": original("gpt2"), "wide": wide, "short": short, "edited": model, "cut": model}.get(plan)
    found = None if made is None else linearize.plan(made, "hedgehog", {"features": 4})
    if plan == "edited":
        found = found.with_layers([dataclasses.replace(layer, kernel="elu") for layer in found.layers])
    if plan == "cut":
        found = dataclasses.replace(found, layers=found.layers[1:])
    with pytest.raises(LinearizeError, match=message):
        linearize.apply(model, found)
    assert type(model.config) is transformers.BertConfig and type(model) is transformers.BertModel
    linearize.convert(model, "elu")


def test_apply_refuses_a_converted_model_and_one_without_weights():
    model = original("bert")
    plan = linearize.plan(model)
    with pytest.raises(UnsupportedModelError, match="is already converted"):
        linearize.apply(linearize.apply(model, plan), plan)
    with pytest.raises(UnsupportedModelError, match="on the meta device, without weights; load them first"):
        linearize.convert(original("bert").to("meta"))
