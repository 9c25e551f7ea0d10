"""The model card, and what `inspect` says of a folder."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
import yaml
from support.tiny import BART, TEXT, converted, original
from transformers import AutoModel

import linearize
from linearize.attention.interface import linear_attentions
from linearize.checkpoint.inspect import inspect_checkpoint
from linearize.checkpoint.push import with_name
from linearize.checkpoint.save import base_facts, model_card
from linearize.core.errors import CheckpointError
from linearize.jobs.advice import load_lines
from linearize.jobs.config import ConvertJob
from linearize.jobs.convert import convert_checkpoint
from linearize.training.processes import machines_used, processor_name

LAYER = {"module": "encoder.layer.0.attention.self", "kernel": "hedgehog", "kl": 0.5, "output_error": 0.25}
PROVENANCE = {
    "base_model": "alice/tiny-bert",
    "dataset": "wikitext",
    "distillation": {
        "steps": 30,
        "stopped": "steps",
        "before": {"mean": {"kl": 0.75, "output_error": 0.5}, "layers": [LAYER]},
        "after": {"mean": {"kl": 0.125, "output_error": 0.25}, "layers": [{**LAYER, "kl": 0.125}]},
    },
    "finetuning": {"task": "sst2", "data": "glue", "steps": 9, "metrics": {"accuracy": 0.9, "note": "x"}},
}


@pytest.fixture
def saved(tmp_path):
    model = converted("bert", "AutoModelForMaskedLM", keep_softmax=[1])
    linearize.save(model, tmp_path / "out", provenance=PROVENANCE)
    return tmp_path / "out"


def front_matter(text):
    return yaml.safe_load(text.split("---")[1])


def test_card_says_what_the_model_is(saved):
    text = (saved / "README.md").read_text()
    front = front_matter(text)
    assert front["library_name"] == "transformers"
    assert front["pipeline_tag"] == "fill-mask"
    assert {"linearize", "hedgehog"} <= set(front["tags"])
    assert "alice/tiny-bert" in text
    assert "phi(x) = [act(W x + b)" in text
    assert "arxiv.org/abs/2402.04347" in text
    assert "AutoModelForMaskedLM.from_pretrained" in text
    assert "`encoder.layer.1.attention.self` | softmax |  | kept on request |" in text
    assert "30 steps on wikitext" in text
    assert "| `encoder.layer.0.attention.self` | 0.5 | 0.125 | 0.25 | 0.25 |" in text
    assert "Longest input: 64 tokens" in text
    assert str(saved.parent) not in text


POINTS = [
    {"name": "hedgehog everywhere", "kernels": "2 x hedgehog", "error": 0.5, "share": 0.2},
    {"name": "the plan", "kernels": "1 x t2r, 1 x <b>|", "error": 0.25, "share": 0.125, "efficient": True},
]
SEARCHED = {
    "points": POINTS,
    "layers": [{"layer": 0, "why": "the closest | of 8"}, {"layer": 1, "why": "kept: why not"}, {"why": 1}, 3],
    "figure": "logits, nats",
    "length": 4096,
    "limit": 0.25,
    "budget": {"softmax": 1},
    "reference": "hedgehog",
    "steps": 300,
    "plans_tried": 21,
}


SOUND = {**TEXT, "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
SOUND |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 32}
WHISPER = {**BART, "max_source_positions": 20, "max_target_positions": 32, "num_mel_bins": 8, "pad_token_id": 0}
WHISPER.pop("max_position_embeddings")


@pytest.mark.parametrize(
    "kind, config, sizes, auto, tag",
    [
        ("Wav2Vec2ForCTC", "Wav2Vec2Config", SOUND, "AutoModelForCTC", None),
        ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", SOUND, "AutoModelForAudioClassification", None),
        ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, "AutoModelForSpeechSeq2Seq", None),
        ("BartForConditionalGeneration", "BartConfig", BART, "AutoModelForSeq2SeqLM", "text-generation"),
        (
            "GPT2LMHeadModel",
            "GPT2Config",
            {"n_embd": 32, "n_layer": 1, "n_head": 4},
            "AutoModelForCausalLM",
            "text-generation",
        ),
    ],
)
def test_the_line_that_loads_it_loads_its_head(kind, config, sizes, auto, tag, tmp_path):
    """The class's name alone made a language model of Whisper, and a text classifier of wav2vec 2.0."""
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()
    linearize.save(linearize.convert(model), tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert f"model = {auto}.from_pretrained" in text
    assert f"{auto}.from_pretrained" in load_lines(model, tmp_path / "out")
    assert front_matter(text).get("pipeline_tag") == tag
    assert type(getattr(transformers, auto).from_pretrained(tmp_path / "out")) is type(model)


def test_a_head_that_no_auto_class_loads_is_loaded_too(tmp_path, monkeypatch):
    """The card and `convert` said AutoModel, which drops the trained head of a forecaster."""
    sizes = {"d_model": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "ffn_dim": 32, "context_length": 32}
    config = transformers.PatchTSTConfig(**sizes, patch_length=4, patch_stride=4, prediction_length=4)
    model = linearize.convert(transformers.PatchTSTForPrediction(config).eval())
    linearize.save(model, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    card = with_name((tmp_path / "out" / "README.md").read_text(), "out")
    snippet = card.partition("```python\n")[2].partition("```")[0]
    series = torch.randn(1, 32, 1)
    for lines in (snippet, load_lines(model, "out").replace("; load_converted", "; model = load_converted")):
        assert "trust_remote_code" not in lines
        made = {}
        exec(lines, made)
        assert type(made["model"]) is type(model)
        with torch.no_grad():
            sides = [one(past_values=series).prediction_outputs for one in (made["model"], model)]
        assert torch.equal(*sides)


def test_a_card_shows_the_plan_of_a_search_and_why(tmp_path):
    model = converted("bert", "AutoModelForMaskedLM", keep_softmax=[1])
    linearize.save(model, tmp_path / "out", provenance={**PROVENANCE, "search": SEARCHED})
    text = (tmp_path / "out" / "README.md").read_text()
    assert "within 0.25 times softmax's time at 4,096 tokens, where 1 may stay softmax: 1 x t2r, 1 x &lt;b&gt;" in text
    assert "at 0.125 of that time, with error 0.25 (logits, nats, of the whole model" in text
    assert r"| hedgehog |  | the closest \| of 8 |" in text and "| softmax |  | kept: why not |" in text
    assert "| search | 300 steps, 21 plans tried |" in text
    inspected = dict(inspect_checkpoint(tmp_path / "out").rows())
    assert "at 0.125 of that time, with error 0.25 (logits, nats, of" in inspected["search, the plan"]
    assert inspected["why layer 1"] == "kept: why not"


@pytest.mark.parametrize(
    "said",
    [
        {"search": 1},
        {"search": {"points": 3, "layers": {"a": 1}, "length": "x", "limit": float("nan"), "budget": []}},
        {"search": {"points": [{"name": "the plan"}], "layers": [{"layer": "0", "why": 2}]}},
        {"plan": {"why": {"a": 1, "0": None}}},
    ],
)
def test_what_a_record_says_wrongly_of_a_search_is_left_out(said):
    model = converted("bert")
    model.config.linearize["provenance"] = said
    assert "How the kernels were chosen" not in model_card(model)


def test_the_reasons_of_a_plan_file_are_shown():
    model = converted("bert", keep_softmax=[1])
    model.config.linearize["provenance"] = {"plan": {"why": {"0": "mine"}}}
    text = model_card(model)
    assert "| hedgehog |  | mine |" in text and "kept on request" in text and "How the kernels were" not in text


def test_untrained_card_says_so(tmp_path):
    linearize.save(converted("gpt2", "AutoModelForCausalLM"), tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "they were not trained" in text
    assert front_matter(text)["pipeline_tag"] == "text-generation"


def test_licence_is_taken_over_and_survives_a_second_round(tmp_path):
    original("bert").save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\nlanguage: en\nother: 1\n---\n# Base\n")
    assert base_facts(str(tmp_path / "base")) == {"license": "mit", "language": "en"}
    model = linearize.convert(AutoModel.from_pretrained(tmp_path / "base"))
    linearize.save(model, tmp_path / "one")
    linearize.save(AutoModel.from_pretrained(tmp_path / "one"), tmp_path / "two")
    for name in ("one", "two"):
        text = (tmp_path / name / "README.md").read_text()
        assert front_matter(text)["license"] == "mit"
        assert str(tmp_path) not in text


@pytest.mark.parametrize("text", ["", "no front", "---\n: [\n---\n", "---\n- a\n---\n"])
def test_a_card_without_facts_gives_none(text, tmp_path):
    (tmp_path / "README.md").write_text(text)
    assert base_facts(str(tmp_path)) == {}
    assert base_facts("nobody/nothing") == {}


def test_every_kernel_has_a_card():
    from linearize.core.registry import kernel_infos

    for info in kernel_infos():
        arguments = {"max_positions": 64} if info.maximum_positions else {}
        near = {"window": 4} if info.needs_window else {}
        model = converted("bert" if info.bidirectional else "gpt2", kernel=info.name, kernel_args=arguments, **near)
        assert f"[{info.source}]({info.url})" in model_card(model) or info.preset is not None


def test_inspect_converted(saved):
    info = inspect_checkpoint(saved)
    model = AutoModel.from_pretrained(saved)
    assert info.converted
    assert (info.base_model, info.model_type) == ("alice/tiny-bert", "bert")
    assert info.architecture == "LinearizedBertForMaskedLM"
    assert [layer.kernel for layer in info.plan.layers] == ["hedgehog", "softmax"]
    assert info.parameters_added == 4 * (8 * 8 + 8) == sum(p.numel() for p in kernels(model))
    assert info.max_length == 64
    assert info.format_version == 1
    assert info.provenance.values == PROVENANCE
    rows = dict(info.rows())
    assert rows["converted"] == "yes: 1 x hedgehog, 1 x softmax"
    assert rows["fidelity after"] == "kl 0.125, output error 0.25"
    assert rows["metric accuracy"] == "0.9"


def kernels(model):
    return [p for layer in linear_attentions(model).values() for p in layer.parameters()]


def test_inspect_counts_what_is_in_the_file(saved):
    from safetensors.torch import load_file

    tensors = load_file(saved / "model.safetensors")
    assert inspect_checkpoint(saved).parameters_total == sum(t.numel() for t in tensors.values())


def test_inspect_an_ordinary_model(tmp_path):
    original("gpt2", "AutoModelForCausalLM").save_pretrained(tmp_path)
    info = inspect_checkpoint(tmp_path)
    assert not info.converted
    assert info.plan is None
    assert (info.model_type, info.architecture, info.max_length) == ("gpt2", "GPT2LMHeadModel", 64)
    assert dict(info.rows())["converted"].startswith("no")


def test_inspect_reads_no_weights(saved, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", None)
    monkeypatch.setattr("transformers.modeling_utils.PreTrainedModel.from_pretrained", None)
    assert inspect_checkpoint(saved).converted


def test_inspect_bad_folders(saved, tmp_path):
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: expected a folder with a config\.json"):
        inspect_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="nobody/nothing"):
        inspect_checkpoint("nobody/nothing")
    config = saved / "config.json"
    text = config.read_text()
    config.write_text(text[:100])
    with pytest.raises(CheckpointError, match=r"cannot be loaded, its config\.json"):
        inspect_checkpoint(saved)
    config.write_text(json.dumps({"model_type": "nonsense"}))
    with pytest.raises(CheckpointError, match="no known model"):
        inspect_checkpoint(saved)
    config.write_text(text)
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut off"):
        inspect_checkpoint(saved)


def test_card_says_what_a_stage_cost_who_to_cite_and_a_lacking_licence():
    model = converted("bert", kernel="hedgehog")
    stage = {"steps": 9, "stopped": "steps", "seconds": 1234.5, "hardware": "EPYC, 1 thread, in 2 processes"}
    model.config.linearize["provenance"] = {"distillation": stage, "alignment": {**stage, "train": "all"}}
    text = model_card(model)
    assert "| stage one | 9 steps on the built-in data (steps); 1,234 s on EPYC, 1 thread, in 2 processes |" in text
    assert (
        "| alignment | 9 steps with its own softmax, trained: all; 1,234 s on EPYC, 1 thread, in 2 processes |" in text
    )
    assert f"paper of each kernel above ({linearize.kernel_info('hedgehog').url})" in text
    assert "fails instead of computing softmax" in text
    assert "names no licence" in text and "names no licence" not in model_card(model, facts={"license": "mit"})


def test_what_a_run_computed_on_has_names(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    name = processor_name()
    assert name and machines_used() == f"{name}, 1 thread"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert machines_used() == f"{name}, 4 threads, in 2 processes"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    assert machines_used() == "H200, in 2 processes"


def test_card_says_window_and_sinks():
    text = model_card(converted("bert", window=8, sinks=2))
    assert "| `encoder.layer.0.attention.self` | hedgehog | window=8, sinks=2, scale=linear |" in text


@pytest.mark.parametrize("kind", ["Wav2Vec2ForCTC", "Wav2Vec2ForSequenceClassification"])
def test_a_conversion_keeps_what_prepares_sound(kind, tmp_path):
    """Only tokenizers and image processors were kept, so that no pipeline opened the folder."""
    model = getattr(transformers, kind)(transformers.Wav2Vec2Config(**SOUND)).eval()
    model.save_pretrained(tmp_path / "first")
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000, return_attention_mask=True)
    if kind.endswith("CTC"):
        (tmp_path / "vocab.json").write_text(json.dumps({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "a": 5}))
        tokenizer = transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"))
        transformers.Wav2Vec2Processor(extractor, tokenizer).save_pretrained(tmp_path / "first")
    else:
        extractor.save_pretrained(tmp_path / "first")
    job = {"model": str(tmp_path / "first"), "output": str(tmp_path / "out"), "distill_steps": 0, "align_steps": 0}
    convert_checkpoint(ConvertJob.of(**job, device="cpu"))
    assert transformers.AutoFeatureExtractor.from_pretrained(tmp_path / "out").sampling_rate == 8000
    if kind.endswith("CTC"):
        processor = transformers.AutoProcessor.from_pretrained(tmp_path / "out")
        assert processor.tokenizer("a").input_ids == [5]
