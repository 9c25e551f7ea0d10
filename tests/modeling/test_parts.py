"""Models that transformers puts together from several: each converted part is found again, to the bit."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.generation import GREEDY, generate_and_check
from support.tiny import CONFIGS, IMAGE, TEXT, converted, inputs_of, outputs, stir

import linearize
from linearize.attention.interface import linear_attentions
from linearize.core.errors import CheckpointError


def saved(model, folder):
    linearize.save(model, folder)
    return str(folder)


def kernels(model):
    """Every kernel parameter by name."""
    return {name: p for name, p in model.named_parameters() if ".linear_attention." in name}


def assert_same(one, other, inputs):
    """The same classes, kernels and outputs."""
    assert kernels(one).keys() == kernels(other).keys() and kernels(one)
    assert all(torch.equal(p, kernels(other)[name]) for name, p in kernels(one).items())
    for mine, theirs in zip(outputs(one, inputs), outputs(other, inputs), strict=True):
        assert torch.equal(mine, theirs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("parts")
    decoder = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIGS["gpt2"][1]))
    other = transformers.BertLMHeadModel(transformers.BertConfig(**TEXT, is_decoder=True))
    return {
        "bert decoder": saved(stir(linearize.convert(other.eval())), root / "other"),
        "bert": saved(converted("bert"), root / "bert"),
        "vit": saved(converted("vit"), root / "vit"),
        "gpt2": saved(stir(linearize.convert(decoder.eval())), root / "gpt2"),
    }


def test_encoder_and_decoder(folders, tmp_path):
    model = transformers.EncoderDecoderModel.from_encoder_decoder_pretrained(folders["bert"], folders["gpt2"]).eval()
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    inputs = inputs_of(model.encoder)
    inputs["decoder_input_ids"] = inputs["input_ids"][:, :5]
    model.save_pretrained(tmp_path / "both")
    loaded = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "both").eval()
    assert type(loaded.encoder) is type(model.encoder) and type(loaded.decoder) is type(model.decoder)
    assert len(linear_attentions(loaded)) == 4
    assert_same(model, loaded, inputs)
    del inputs["decoder_input_ids"]
    generate_and_check(loaded, inputs, **GREEDY)


def test_image_encoder_and_decoder(folders, tmp_path):
    parts = folders["vit"], folders["bert decoder"]
    model = transformers.VisionEncoderDecoderModel.from_encoder_decoder_pretrained(*parts)
    model.eval().save_pretrained(tmp_path / "both")
    loaded = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path / "both").eval()
    inputs = {**inputs_of(model.encoder), "decoder_input_ids": torch.tensor([[1, 5, 7]] * 3)}
    assert len(linear_attentions(loaded)) == 4
    assert_same(model, loaded, inputs)


def test_image_and_text(folders, tmp_path):
    model = transformers.VisionTextDualEncoderModel.from_vision_text_pretrained(folders["vit"], folders["bert"]).eval()
    model.save_pretrained(tmp_path / "both")
    loaded = transformers.VisionTextDualEncoderModel.from_pretrained(tmp_path / "both").eval()
    assert len(linear_attentions(loaded)) == 4
    assert_same(model, loaded, inputs_of(model.text_model) | inputs_of(model.vision_model))


def test_one_part_converted(folders, tmp_path):
    """The other part keeps softmax."""
    decoder = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIGS["gpt2"][1]))
    decoder.save_pretrained(tmp_path / "softmax")
    parts = folders["bert"], str(tmp_path / "softmax")
    model = transformers.EncoderDecoderModel.from_encoder_decoder_pretrained(*parts).eval()
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    model.save_pretrained(tmp_path / "both")
    loaded = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "both").eval()
    assert len(linear_attentions(loaded)) == 2 and loaded.decoder.config._attn_implementation == "sdpa"
    inputs = inputs_of(model.encoder)
    assert_same(model, loaded, inputs | {"decoder_input_ids": inputs["input_ids"][:, :5]})


def test_a_backbone(tmp_path):
    sizes = {key: value for key, value in IMAGE.items() if key != "intermediate_size"}
    torch.manual_seed(0)
    model = transformers.Dinov2Backbone(transformers.Dinov2Config(**sizes, out_features=["stage1", "stage2"])).eval()
    model = stir(linearize.convert(model))
    folder = saved(model, tmp_path / "backbone")
    pixels = torch.randn(2, 3, 30, 30)
    # From its config, as a head that is put on a backbone does, with the weights of the folder.
    made = transformers.AutoBackbone.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    made.load_state_dict(model.state_dict())
    for one, other in zip(model(pixels).feature_maps, made(pixels).feature_maps, strict=True):
        assert torch.equal(one, other)
    assert type(made) is type(model) and len(linear_attentions(made)) == 2


def test_a_cross_encoder(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog"]
    tokenizer = transformers.BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    model = converted("bert", "AutoModelForSequenceClassification", config={"num_labels": 1})
    linearize.save(model, tmp_path / "out", processor=tokenizer)
    pairs = [("a cat", "a dog"), ("a", "a dog dog")]
    ranker = sentence_transformers.CrossEncoder(str(tmp_path / "out"), device="cpu", max_length=32)
    scores = torch.as_tensor(ranker.predict(pairs))
    batch = tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
    torch.testing.assert_close(scores, outputs(model, batch)[0][:, 0].sigmoid())
    ranker.save_pretrained(str(tmp_path / "again"))
    again = sentence_transformers.CrossEncoder(str(tmp_path / "again"), device="cpu", max_length=32)
    assert torch.equal(torch.as_tensor(again.predict(pairs)), scores)


def test_a_damaged_part_is_refused(folders):
    values = transformers.AutoConfig.from_pretrained(folders["bert"]).to_dict()
    values["linearize"] = {**values["linearize"], "format_version": 99}
    with pytest.raises(CheckpointError, match="format version 99"):
        transformers.EncoderDecoderConfig(encoder=values, decoder=values)
