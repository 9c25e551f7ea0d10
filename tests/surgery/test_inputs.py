"""Inputs for the trial run: made up in several ways, for parts by themselves, or read from a file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.tiny import BART, CLIP_TEXT, IMAGE, TEXT, original

import linearize
from linearize.cli import main
from linearize.conversion.attentions import trial_runs
from linearize.conversion.check import check, record
from linearize.conversion.inputs import candidates, read_inputs
from linearize.core.errors import ConfigError, UnsupportedModelError

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 37}


def llava():
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT}, vision_config={"model_type": "clip_vision_model", **IMAGE}
    )
    config.image_token_id = 98
    return transformers.LlavaForConditionalGeneration(config).eval()


class Other(transformers.PreTrainedModel):
    config_class = transformers.BertConfig
    main_input_name = "something"

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, something):
        return self.layer(something)


def test_parts_that_do_not_run_with_tokens_alone_run_by_themselves():
    model = llava()
    runs = trial_runs(model)[0]
    assert runs[0][0] is model
    assert set(runs[0][1]) == {"input_ids"}
    assert [set(inputs) for _, inputs in runs[1:]] == [{"pixel_values"}]
    plan = linearize.plan(model)
    assert [layer.shape.causal for layer in plan.converted] == [True, True, False, False]
    recorded = record(trial_runs(model)[0])
    assert len(recorded) == 3
    check(linearize.convert(model), recorded)


def test_sound_and_video_have_shapes_of_their_own():
    sizes = {**SMALL, "num_mel_bins": 16, "max_length": 32, "patch_size": 8}
    spectra = transformers.ASTModel(transformers.ASTConfig(**sizes))
    assert len(trial_runs(spectra)[1]) == 2
    sizes = {**SMALL, "image_size": 16, "patch_size": 8, "num_frames": 4, "tubelet_size": 2}
    video = transformers.VideoMAEModel(transformers.VideoMAEConfig(**sizes))
    assert [inputs["pixel_values"].ndim for _, inputs in trial_runs(video)[0]] == [5]
    assert len(linearize.plan(video).converted) == 2


def test_tokens_of_a_meaning_are_left_out():
    model = original("llama", eos_token_id=[5, 6], image_token_id=7)
    assert next(iter(candidates(model)))["input_ids"].tolist() == [[1, 2, 3, 4, 8, 9, 5]]


def test_a_model_of_unknown_inputs_names_the_option():
    with pytest.raises(UnsupportedModelError, match=r"takes something, expected .*--example-inputs FILE"):
        trial_runs(Other(transformers.PreTrainedConfig()))
    # States of the config's size were made up, which it does not take.
    with pytest.raises(UnsupportedModelError, match="--example-inputs FILE"):
        trial_runs(Other(transformers.BertConfig(**TEXT)))


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_inputs_from_a_file(kind, tmp_path):
    model, path = original("bert").half(), str(tmp_path / f"batch.{kind}")
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "inputs_embeds": torch.zeros(1, 3, 32)}
    if kind == "npz":
        np.savez(path, **{key: x.numpy() for key, x in batch.items()})
    else:
        save_file(batch, path)
    found = read_inputs(path, model)
    assert torch.equal(found["input_ids"], batch["input_ids"])
    assert found["inputs_embeds"].dtype == torch.float16


def test_files_that_are_none(tmp_path):
    model = original("bert")
    pickled = str(tmp_path / "objects.npz")
    np.savez(pickled, input_ids=np.array([{"a": 1}], dtype=object))
    junk = tmp_path / "junk.safetensors"
    junk.write_bytes(b"no tensors")
    for path in (pickled, str(junk), str(tmp_path / "missing.npz")):
        with pytest.raises(ConfigError, match=r"cannot be read .* expected a .safetensors or .npz file") as caught:
            read_inputs(path, model)
        assert "\n" not in str(caught.value)
    other = str(tmp_path / "other.safetensors")
    save_file({"pixel_values": torch.zeros(1, 3, 4, 4)}, other)
    vision = original("vit")
    assert set(read_inputs(other, vision)) == {"pixel_values"}
    save_file({"waves": torch.zeros(1, 3)}, other)
    model = original("bert")
    with pytest.raises(UnsupportedModelError, match=r"a trial run of BertModel on waves \[1, 3\] failed"):
        linearize.plan(model, example_inputs=read_inputs(other, model))


def test_a_damaged_compressed_file_is_refused(tmp_path):
    """Wherever the damage is: some of it raised zlib's own error."""
    model, path = original("bert"), tmp_path / "damaged.npz"
    np.savez_compressed(path, input_ids=np.random.default_rng(0).integers(0, 90, (4, 500)))
    content = path.read_bytes()
    # Past the headers, where every byte counts.
    for place in range(200, len(content) - 200, 101):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        with pytest.raises(ConfigError, match=r"cannot be read \(.*\); expected a"):
            read_inputs(str(path), model)


def test_the_command_line_takes_a_file(tmp_path, capsys):
    original("bert").save_pretrained(tmp_path / "model")
    save_file({"input_ids": torch.tensor([[5, 6, 7, 8]])}, str(tmp_path / "batch.safetensors"))
    untrained = ["--distill-steps", "0", "--align-steps", "0"]  # The model has no tokenizer.
    line = ["convert", str(tmp_path / "model"), "--dry-run", "--json", *untrained, "--example-inputs"]
    assert main([*line, str(tmp_path / "batch.safetensors")]) == 0
    assert '"kernel": "hedgehog"' in capsys.readouterr().out
    assert main([*line, str(tmp_path / "none.npz")]) == 2
    assert "example inputs:" in capsys.readouterr().err


SERIES = {"d_model": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "context_length": 12, "patch_length": 4}
HOSTS = {
    "a series in patches": ("PatchTST", {**SERIES, "patch_stride": 4, "ffn_dim": 16}, 2),
    "a series with its future": ("TimeSeriesTransformer", {"prediction_length": 5, "d_model": 16}, 4),
    "a series with its padding": ("TimesFm", {**SMALL, "head_dim": 16, "patch_length": 8, "context_length": 64}, 2),
    "a language": ("Xmod", {**SMALL, "vocab_size": 99, "max_position_embeddings": 32}, 2),
}


@pytest.mark.parametrize("name", HOSTS)
def test_what_goes_with_the_main_input_is_made_up(name):
    kind, sizes, count = HOSTS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes)).eval()
    plan = linearize.plan(model)
    assert len(plan.converted) == count
    linearize.apply(model, plan)


def test_several_tokens_at_a_place():
    """A token of text and one of every codebook (Kyutai's speech model)."""
    config = transformers.KyutaiSpeechToTextConfig(
        **SMALL,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=99,
        codebook_vocab_size=9,
        num_codebooks=3,
        ffn_dim=32,
        audio_pad_token_id=100,
        pad_token_id=0,
        codec_config=None,
    )
    model = transformers.KyutaiSpeechToTextModel(config).eval()
    assert trial_runs(model)[0][0][1]["input_ids"].shape[2] == 4
    assert record(trial_runs(model)[0])[0][1]["input_ids"].ndim == 3


def test_attention_in_the_head_alone_is_refused_for_that():
    class Head(transformers.BertForMaskedLM):
        def __init__(self, config):
            super().__init__(config)
            self.more = transformers.models.bert.modeling_bert.BertLayer(config)
            self.bert.encoder.layer = torch.nn.ModuleList()

        def forward(self, input_ids):
            return self.more(self.bert(input_ids).last_hidden_state)

    config = transformers.BertConfig(**SMALL, vocab_size=99)
    with pytest.raises(UnsupportedModelError, match=r"attention in its head only \(BertSelfAttention"):
        linearize.plan(Head(config).eval())


def test_attentions_of_a_head_that_stay_softmax_are_named(tmp_path):
    sizes = {"reduce_dim": 16, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 20, "projection_dim": 16}
    config = transformers.CLIPSegConfig(
        text_config=CLIP_TEXT, vision_config=IMAGE, **sizes, extract_layers=[0, 1], conditional_layer=0
    )
    model = transformers.CLIPSegForImageSegmentation(config).eval()
    plan = linearize.plan(model)
    kept = {layer.module: layer.reason for layer in plan.layers if not layer.converted}
    assert len(plan.converted) == 4 and list(kept) == [f"../decoder.layers.{i}.self_attn" for i in range(2)]
    assert all(reason.startswith("outside of the body") for reason in kept.values())
    linearize.save(linearize.apply(model, plan).eval(), tmp_path / "out")
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert linearize.Plan.from_dict(loaded.config.linearize) == plan
    # The body alone has no such modules.
    model.base_model.save_pretrained(tmp_path / "body")
    assert transformers.AutoModel.from_pretrained(tmp_path / "body").config.linearize["layers"]


def test_an_image_encoder_tells_the_size_of_its_model():
    """An image of another size failed, so that the parts ran apart and the cross-attention was called unreached."""
    image = transformers.ViTConfig(**IMAGE)
    text = transformers.MBartConfig(**BART)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(image, text)
    plan = linearize.plan(transformers.VisionEncoderDecoderModel(config).eval())
    assert [layer.reason for layer in plan.layers if not layer.converted] == ["cross-attention"] * 2
    assert len(plan.converted) == 4
