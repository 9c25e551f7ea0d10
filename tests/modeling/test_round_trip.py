"""Convert, save, load through every Auto class: the same numbers, and the same class of the original."""

from __future__ import annotations

import json
import logging
import re

import pytest
import torch
import transformers
from support.tiny import converted, inputs_of, original, outputs, stir
from support.training import Fixed
from transformers import AutoConfig, AutoModel

import linearize
from linearize.attention.interface import linear_attentions
from linearize.attention.mixer import IMPLEMENTATION
from linearize.core.errors import CheckpointError, ConfigError
from linearize.modeling.config import GUARD
from linearize.modeling.model import LinearizedModel
from linearize.modeling.weights import check_loaded
from linearize.training.run import fade_beyond

TEXT_HEADS = [
    "AutoModel",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForMultipleChoice",
    "AutoModelForQuestionAnswering",
]
DECODER_HEADS = [
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
]
IMAGE_HEADS = ["AutoModel", "AutoModelForImageClassification"]
MATRIX = [
    *[(name, head) for name in ("bert", "roberta", "distilbert", "modernbert") for head in TEXT_HEADS],
    *[(name, head) for name in ("gpt2", "llama", "qwen2") for head in DECODER_HEADS],
    *[(name, head) for name in ("vit", "deit", "dinov2", "clip") for head in IMAGE_HEADS],
    *[(name, head) for name in ("mistral", "gemma3") for head in ("AutoModel", "AutoModelForCausalLM")],
    *[("bart", head) for head in ("AutoModel", "AutoModelForSeq2SeqLM", "AutoModelForSequenceClassification")],
]
DEFAULT = [
    "bert-ModelForSequenceClassification",
    "bert-ModelForMultipleChoice",
    "roberta-ModelForMaskedLM",
    "distilbert-ModelForQuestionAnswering",
    "modernbert-ModelForTokenClassification",
    "modernbert-Model",
    "gpt2-ModelForSequenceClassification",
    "llama-ModelForCausalLM",
    "llama-ModelForTokenClassification",
    "qwen2-ModelForQuestionAnswering",
    "qwen2-Model",
    "vit-ModelForImageClassification",
    "deit-Model",
    "dinov2-Model",
    "clip-Model",
    "mistral-ModelForCausalLM",
    "gemma3-Model",
    "bart-ModelForSeq2SeqLM",
    "bart-ModelForSequenceClassification",
]
"""Every model and every head; other pairs are left to `make slow`."""


@pytest.mark.parametrize(
    ("name", "head"),
    [
        pytest.param(name, head, id=short, marks=[pytest.mark.slow] * (short not in DEFAULT))
        for name, head in MATRIX
        for short in [f"{name}-{head.removeprefix('Auto')}"]
    ],
)
def test_save_and_load_through_auto_class(name, head, tmp_path):
    model = converted(name, head)
    linearize.save(model, tmp_path / "out")
    loaded, info = getattr(transformers, head).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert isinstance(loaded, type(original(name, head)))
    assert len(linear_attentions(loaded)) == len(linear_attentions(model)) >= 2
    want, got = model.state_dict(), loaded.state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[key], got[key]) for key in want)
    inputs = inputs_of(model)
    before, after = outputs(model, inputs), outputs(loaded, inputs)
    # Weights that lie elsewhere in memory may be summed in another order by a matrix-vector product.
    for one, two in zip(before, after, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-6)


@pytest.mark.sampled("values")
@pytest.mark.parametrize("guarded", [True, False], ids=["now", "before"])
@pytest.mark.parametrize(
    ("name", "head", "stock"),
    [
        ("bert", "AutoModelForMaskedLM", "BertForMaskedLM"),
        ("bert", "AutoModelForMaskedLM", "BertModel"),
        ("llama", "AutoModelForCausalLM", "LlamaForCausalLM"),
        ("bart", "AutoModelForSeq2SeqLM", "BartForConditionalGeneration"),
        ("clip", "AutoModel", "CLIPModel"),
    ],
)
def test_a_class_of_transformers_loads_ours(name, head, stock, guarded, tmp_path):
    """As `transformers serve` does, which gives no config. It never runs softmax, with the guard in config.json or,
    in older checkpoints, without it; the config's own class still refuses the file."""
    linearize.save(converted(name, head), tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    if not guarded:
        text = file.read_text()
        assert text.count(GUARD) == (2 if name == "clip" else 1)
        file.write_text(re.sub(f'"([^"]*){re.escape(GUARD)}"', r"\1", text))
    kind = getattr(transformers, stock)
    loaded, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    expected = getattr(transformers, head).from_pretrained(tmp_path / "out")
    assert isinstance(loaded, kind) and isinstance(loaded, LinearizedModel)
    assert not any("linear_attention" in key for key in report["missing_keys"])
    same = loaded.base_model.state_dict()
    # The body of a model with a head may lack a part, such as a pooler.
    assert all(
        torch.equal(value, same[name]) for name, value in expected.base_model.state_dict().items() if name in same
    )
    assert len(linear_attentions(loaded)) == len(linear_attentions(expected)) > 0
    with pytest.raises(CheckpointError, match="which this class would run as softmax; load it with an Auto class"):
        kind.config_class.from_pretrained(tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"ElectraModel: got the .* of a converted model, expected a config of this"
    ):
        transformers.ElectraModel.from_pretrained(tmp_path / "out")


def test_a_class_of_a_part_refuses_it(tmp_path):
    linearize.save(converted("clip"), tmp_path / "out")
    for stock in (transformers.CLIPTextModel, transformers.CLIPVisionModel):
        with pytest.raises(Exception, match="linear attention: load it with an Auto class"):
            stock.from_pretrained(tmp_path / "out")


def test_differs_from_softmax_and_starts_close_to_it(tmp_path):
    model = original("bert")
    inputs = inputs_of(model)
    before = outputs(model, inputs)[0]
    after = outputs(linearize.convert(model), inputs)[0]
    assert 1e-4 < (before - after).abs().max() < 1.0


def test_second_round_writes_the_same_files(tmp_path):
    linearize.save(converted("bert", "AutoModelForMaskedLM"), tmp_path / "one")
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "two")
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "two")
    again.save_pretrained(tmp_path / "three")
    files = sorted(path.name for path in (tmp_path / "three").iterdir())
    assert set(files) == {path.name for path in (tmp_path / "two").iterdir()}
    for name in files:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "three" / name).read_bytes(), name


@pytest.mark.parametrize("kernel", ["flexformer_n", "flexformer_s"])
def test_a_checkpoint_that_does_not_say_its_form_is_the_papers(kernel, tmp_path):
    """They were written when that was the default, and defaults were not; nor was there a checksum then."""
    model = converted("bert", kernel=kernel, kernel_args={"form": "paper", "floor": 0.0})
    linearize.save(model, tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    values = json.loads(file.read_text())
    del values["linearize"]["checksum"]
    for layer in values["linearize"]["layers"]:
        assert layer["arguments"] == {"form": "paper", "floor": 0.0} and layer.pop("host")
        layer["arguments"] = {}
    file.write_text(json.dumps(values))
    inputs = inputs_of(model)
    for name in ("out", "again"):
        loaded = AutoModel.from_pretrained(tmp_path / name)
        assert {layer.mixer.config.form for layer in linear_attentions(loaded).values()} == {"paper"}
        assert {layer.mixer.floor for layer in linear_attentions(loaded).values()} == {0.0}
        assert torch.equal(outputs(loaded, inputs)[0], outputs(model, inputs)[0])
        # What it is saved as again.
        linearize.save(loaded, tmp_path / "again", overwrite=True)


def test_a_checkpoint_says_the_default_form(tmp_path):
    model = converted("bert", kernel="flexformer_n")
    linearize.save(model, tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [layer["arguments"] for layer in values["linearize"]["layers"]] == [{"form": "positive", "floor": 0.2}] * 2
    loaded = AutoModel.from_pretrained(tmp_path / "out")
    assert torch.equal(outputs(loaded, inputs_of(model))[0], outputs(model, inputs_of(model))[0])


@pytest.mark.parametrize(
    ("name", "head"), [("bert", "AutoModelForSequenceClassification"), ("vit", "AutoModelForImageClassification")]
)
def test_num_labels_may_change_on_load(name, head, tmp_path):
    linearize.save(converted(name), tmp_path / "base")
    model = getattr(transformers, head).from_pretrained(tmp_path / "base", num_labels=7)
    assert outputs(model, inputs_of(model))[0].shape == (3, 7)
    linearize.save(model, tmp_path / "head")
    other = getattr(transformers, head).from_pretrained(tmp_path / "head", num_labels=4, ignore_mismatched_sizes=True)
    assert outputs(other, inputs_of(other))[0].shape == (3, 4)
    assert other.config.num_labels == 4
    assert all(
        torch.equal(one, two)
        for a, b in zip(linear_attentions(model).values(), linear_attentions(other).values(), strict=True)
        for one, two in zip(a.parameters(), b.parameters(), strict=True)
    )


def test_a_saved_weight_that_is_not_loaded_is_an_error(tmp_path):
    model = converted("bert", "AutoModelForMaskedLM")
    linearize.save(model, tmp_path / "out")
    renamed = {r"embeddings\.position_embeddings": "embeddings.other"}
    with pytest.raises(CheckpointError, match=r"were not loaded \(missing_keys: 'embeddings.position_embed"):
        AutoModel.from_pretrained(tmp_path / "out", add_pooling_layer=False, key_mapping=renamed)
    saved, body = set(model.state_dict()), "bert.embeddings.position_embeddings.weight"
    other = converted("bert", "AutoModelForTokenClassification")
    for loaded, key in ((model, body), (model, "cls.predictions.bias"), (other, body)):
        with pytest.raises(CheckpointError, match=f"were not loaded .missing_keys: '{key}'"):
            check_loaded(loaded, {"missing_keys": {key}}, saved)
    with pytest.raises(CheckpointError, match="unexpected_keys: 'bert"):
        check_loaded(model, {"unexpected_keys": {"bert.other"}}, saved)
    # Another head is new, and the saved one's is left over.
    check_loaded(other, {"missing_keys": {"classifier.bias"}, "unexpected_keys": {"cls.predictions.bias"}}, saved)


def test_another_head_than_saved_keeps_the_body(tmp_path):
    model = converted("bert", "AutoModelForMaskedLM")
    linearize.save(model, tmp_path / "out")
    body = AutoModel.from_pretrained(tmp_path / "out", add_pooling_layer=False)
    inputs = inputs_of(model)
    want = outputs(model, inputs, output_hidden_states=True)
    with torch.no_grad():
        hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
    assert len(want) == 1
    torch.testing.assert_close(outputs(body, inputs)[0], hidden, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "gpt2", "llama", "vit", "modernbert"])
def test_output_attentions_and_hidden_states(name, tmp_path):
    linearize.save(converted(name), tmp_path / "out")
    model = AutoModel.from_pretrained(tmp_path / "out")
    inputs = inputs_of(model)
    with torch.no_grad():
        out = model(**inputs, output_attentions=True, output_hidden_states=True)
    layers = model.config.num_hidden_layers
    assert len(out.hidden_states) == layers + 1
    assert len(out.attentions) == layers
    for weight in out.attentions:
        tokens = out.hidden_states[0].shape[1]
        assert weight.shape == (3, 4, tokens, tokens)
        torch.testing.assert_close(weight.sum(-1), torch.ones(3, 4, tokens), rtol=0, atol=1e-5)
        if "attention_mask" in inputs:
            assert weight[0, ..., -3:].abs().max() == 0
        if name in ("gpt2", "llama"):
            assert weight.triu(1).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_on_load_keeps_kernels_in_fp32(dtype, tmp_path):
    model = converted("llama", "AutoModelForCausalLM")
    linearize.save(model, tmp_path / "out")
    low = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    assert low.model.embed_tokens.weight.dtype == dtype
    assert {p.dtype for layer in linear_attentions(low).values() for p in layer.parameters()} == {torch.float32}
    inputs = inputs_of(model)
    got = outputs(low, inputs)[0]
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), outputs(model, inputs)[0], rtol=0, atol=0.02)
    linearize.save(low, tmp_path / "low")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "low")
    assert again.dtype == dtype
    assert torch.equal(outputs(again, inputs)[0], got)


def test_device_map_and_shards(tmp_path):
    model = converted("gpt2", "AutoModelForCausalLM")
    linearize.save(model, tmp_path / "out", max_shard_size="20KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map="auto")
    inputs = inputs_of(model)
    torch.testing.assert_close(outputs(loaded, inputs)[0], outputs(model, inputs)[0], rtol=0, atol=2e-6)


def test_config_and_tokenizer_and_processor_from_the_folder(tmp_path):
    from transformers import AutoImageProcessor, AutoTokenizer, BertTokenizer, ViTImageProcessor

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog"]
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    linearize.save(converted("bert"), tmp_path / "text", processor=tokenizer)
    config = AutoConfig.from_pretrained(tmp_path / "text")
    assert config.model_type == "bert"
    assert isinstance(config, transformers.BertConfig)
    assert AutoTokenizer.from_pretrained(tmp_path / "text")("a cat").input_ids == [2, 5, 6, 3]
    linearize.save(converted("vit"), tmp_path / "image", processor=ViTImageProcessor(size={"height": 30, "width": 30}))
    assert AutoImageProcessor.from_pretrained(tmp_path / "image").size["height"] == 30


@pytest.mark.parametrize("head", ["AutoModelForMaskedLM", "AutoModelForSequenceClassification"])
@pytest.mark.parametrize("source", ["converted", "loaded"])
def test_the_body_of_a_model_with_a_head_is_saved_by_itself(source, head, tmp_path):
    """That of a masked language model has no pooler; its checkpoint was written, and then refused."""
    model = converted("bert", head)
    inputs = inputs_of(model)
    expected = outputs(model.base_model, inputs)[0]
    if source == "loaded":
        linearize.save(model, tmp_path / "whole")
        model = getattr(transformers, head).from_pretrained(tmp_path / "whole").eval()
    model.base_model.save_pretrained(tmp_path / "body")
    assert torch.equal(outputs(AutoModel.from_pretrained(tmp_path / "body").eval(), inputs)[0], expected)
    again = getattr(transformers, head).from_pretrained(tmp_path / "body").eval()
    assert torch.equal(outputs(again.base_model, inputs)[0], expected)
    # The model itself is saved as before.
    model.save_pretrained(tmp_path / "again")
    loaded = getattr(transformers, head).from_pretrained(tmp_path / "again").eval()
    assert torch.equal(outputs(loaded, inputs)[0], outputs(model, inputs)[0])


def test_a_body_with_a_mask_token_is_saved_by_itself(tmp_path):
    model = converted("vit", "AutoModelForMaskedImageModeling", config={"encoder_stride": 10})
    inputs = inputs_of(model)
    assert any("mask_token" in key for key in model.base_model.state_dict())
    model.base_model.save_pretrained(tmp_path / "body")
    loaded = AutoModel.from_pretrained(tmp_path / "body").eval()
    assert torch.equal(outputs(loaded, inputs)[0], outputs(model.base_model, inputs)[0])
    again = type(model).from_pretrained(tmp_path / "body")
    assert torch.equal(again.base_model.embeddings.mask_token, model.base_model.embeddings.mask_token)


def test_weights_stored_by_the_names_of_the_model_are_loaded(tmp_path):
    model = converted("vit")
    inputs = inputs_of(model)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert torch.equal(outputs(AutoModel.from_pretrained(tmp_path).eval(), inputs)[0], outputs(model, inputs)[0])


@pytest.mark.parametrize("wanted", ["sdpa", "eager", "flash_attention_2"])
def test_another_attention_implementation_is_refused(wanted, tmp_path):
    linearize.save(converted("bert"), tmp_path / "out")
    with pytest.raises(ConfigError, match=f"attn_implementation='{wanted}'"):
        AutoModel.from_pretrained(tmp_path / "out", attn_implementation=wanted)
    model = AutoModel.from_pretrained(tmp_path / "out", attn_implementation=IMPLEMENTATION)
    with pytest.raises(ConfigError, match="softmax"):
        model.set_attn_implementation(wanted)
    with pytest.raises(ConfigError, match=f"attn_implementation='{wanted}'"):
        type(model).from_pretrained(tmp_path / "out", attn_implementation=wanted)


def test_config_json_has_its_own_model_type_and_no_path(tmp_path):
    linearize.save(converted("bert"), tmp_path / "out")
    text = (tmp_path / "out" / "config.json").read_text()
    values = json.loads(text)
    assert values["model_type"] == "linearize"
    assert values["linearize"]["base_model_type"] == "bert"
    assert values["auto_map"] == {"AutoConfig": "modeling_linearize.LinearizeConfig"}
    assert str(tmp_path) not in text


def test_pipelines_run_without_complaint(tmp_path, caplog):
    from transformers import BertTokenizer, pipeline

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog"]
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    transformers.utils.logging.enable_propagation()
    try:
        for head, task in [
            ("AutoModelForSequenceClassification", "text-classification"),
            ("AutoModelForTokenClassification", "token-classification"),
            ("AutoModelForMaskedLM", "fill-mask"),
            ("AutoModel", "feature-extraction"),
        ]:
            folder = tmp_path / task
            linearize.save(converted("bert", head), folder, processor=tokenizer)
            with caplog.at_level(logging.WARNING, logger="transformers"):
                assert pipeline(task, model=str(folder))("a [MASK] dog")
    finally:
        transformers.utils.logging.disable_propagation()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


def test_the_trained_length_is_kept(tmp_path):
    """A causal hybrid has that of the longest rows it was trained on, never of shorter ones; beyond them it fades."""
    model = stir(converted("llama", "AutoModelForCausalLM", window=3, scale="linear"))
    inputs = inputs_of(model, tokens=20)
    before = outputs(model, inputs)[0]
    for row, want in ((9, 9), (5, 9), (12, 12)):
        fade_beyond(model, Fixed([inputs_of(model, tokens=row)]))
        linearize.save(model, tmp_path / str(row))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(row)).eval()
        lengths = {layer.hybrid.trained_length for layer in linear_attentions(loaded).values()}
        assert lengths == {want} == {layer["trained_length"] for layer in loaded.config.linearize["layers"]}
        assert torch.equal(outputs(loaded, inputs)[0], outputs(model, inputs)[0])
    after = outputs(model, inputs)[0]
    torch.testing.assert_close(after[:, :12], before[:, :12])
    assert not torch.allclose(after[:, 12:], before[:, 12:], atol=1e-4)


@pytest.mark.parametrize(
    "name, options",
    [("bert", {"window": 3, "scale": "linear"}), ("llama", {}), ("llama", {"window": 3, "scale": "none"})],
)
def test_what_cannot_fade_has_no_trained_length(tmp_path, name, options):
    model = converted(name, **options)
    fade_beyond(model, Fixed([inputs_of(model, tokens=9)]))
    linearize.save(model, tmp_path / "saved", provenance={"longest_row": 9})
    assert not any("trained_length" in layer for layer in model.config.linearize["layers"])
