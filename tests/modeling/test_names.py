"""In memory a converted model answers the original's names to whoever asks; what it writes has names of its own.

`scripts/name_consumers.py` lists who asks; test_pipelines.py tries the pipelines.
"""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from support.scripts import script
from support.tiny import CONFIGS, converted, inputs_of, original, outputs
from transformers import AutoConfig, AutoModel, GenerationConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _LazyAutoMapping

from linearize.attention.interface import linear_attentions
from linearize.core.errors import CheckpointError
from linearize.modeling.config import GUARD
from linearize.modeling.late import when_imported
from linearize.modeling.model import LinearizedModel

HEADS = {
    "bert": "AutoModelForMaskedLM",
    "gpt2": "AutoModelForCausalLM",
    "bart": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
}
EXACT = {"kernel": "none", "window": 64}
"""Options of a conversion that computes what softmax does, on rows of up to 64 tokens."""


def names(model):
    """Every name that a consumer may ask for: of the model, its parts and their configs."""
    parts = {key: part for key, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    found = {}
    for key, part in parts.items():
        inner = [getattr(part.config, name, None) for name in part.config.sub_configs]
        types_of = [(type(one).__name__, one.model_type) for one in (part.config, *filter(None, inner))]
        found[key] = type(part).__name__, part._get_name(), types_of
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_in_memory_it_has_the_names_of_its_original(name, tmp_path):
    head = HEADS.get(name, "AutoModel")
    stock = original(name, head)
    model = converted(name, head)
    model.save_pretrained(tmp_path / "out")
    loaded = getattr(transformers, head).from_pretrained(tmp_path / "out")
    copies = pickle.loads(pickle.dumps(loaded)), copy.deepcopy(loaded), type(model).from_pretrained(tmp_path / "out")
    for one in (model, loaded, *copies):
        assert names(one) == names(stock)
        assert isinstance(one, type(stock)) and isinstance(one, LinearizedModel)
        # A save changes nothing in memory, so only a loaded model has what its file says.
        assert one.config.architectures == (None if one is model else [type(stock).__name__])
        assert "model_type" not in vars(one.config)
    if stock.can_generate():
        expected = GenerationConfig.from_model_config(stock.config).to_dict()
        assert GenerationConfig.from_model_config(loaded.config).to_dict() == expected


WRITERS = {
    "to_dict": lambda config, file: file.write_text(json.dumps(config.to_dict())),
    "to_json_string": lambda config, file: file.write_text(config.to_json_string()),
    "everything": lambda config, file: file.write_text(config.to_json_string(use_diff=False)),
    "to_json_file": lambda config, file: config.to_json_file(file),
    "save_pretrained": lambda config, file: config.save_pretrained(file.parent),
    "a copy": lambda config, file: copy.deepcopy(config).save_pretrained(file.parent),
    "pickled": lambda config, file: pickle.loads(pickle.dumps(config)).save_pretrained(file.parent),
    "read": lambda config, file: type(config).from_dict(config.to_dict()).save_pretrained(file.parent),
    "made": lambda config, file: AutoConfig.for_model(**config.to_dict()).save_pretrained(file.parent),
    "a model": lambda config, file: AutoModel.from_config(config).save_pretrained(file.parent),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", ["bert", "clip"])
def test_every_writer_writes_the_guard(name, writer, tmp_path):
    model = converted(name)
    model.save_pretrained(tmp_path / "out")
    config, file = AutoConfig.from_pretrained(tmp_path / "out"), tmp_path / "written" / "config.json"
    file.parent.mkdir()
    WRITERS[writer](config, file)
    values = json.loads(file.read_text())
    before = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["model_type"] == "linearize" and values["linearize"] == before["linearize"]
    assert values["architectures"] == [f"Linearized{type(original(name)).__name__}"]
    if writer not in ("to_dict", "everything"):
        assert file.read_text().count(GUARD) == json.dumps(before).count(GUARD) > 0
    # Neither by its type nor by its class does a class of transformers take it for softmax.
    stock = type(original(name).config)
    for given in (values, values | {"model_type": stock.model_type}):
        with pytest.raises(CheckpointError, match="load it with an Auto class"):
            stock.from_dict(given)
    again = AutoConfig.from_pretrained(file.parent)
    again.name_or_path = config.name_or_path
    assert type(again) is type(config) and again.to_dict() == config.to_dict()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_table_finds_our_class(name):
    """Those without an Auto class too: a table that was not told would find the original's entry by its name."""
    base, config = type(original(name).config), type(converted(name).config)
    found = 0
    for kind in (
        "modeling",
        "tokenization",
        "feature_extraction",
        "image_processing",
        "video_processing",
        "processing",
    ):
        for key, table in vars(importlib.import_module(f"transformers.models.auto.{kind}_auto")).items():
            if not isinstance(table, _LazyAutoMapping):
                continue
            assert (config in table) == (base in table), key
            if config not in table:
                continue
            mine, theirs = table[config], table[base]
            if kind != "modeling":
                assert mine is theirs or mine == theirs, key
                continue
            found += 1
            pairs = zip(mine, theirs, strict=True) if isinstance(mine, (tuple, list)) else [(mine, theirs)]
            for one, other in pairs:
                assert issubclass(one, LinearizedModel) and issubclass(one, other), key
                assert one.__name__ == other.__name__ and one is not other
    assert found


def test_the_class_that_architectures_names_loads_ours_with_our_config(tmp_path):
    """As sentence-transformers does, which reads the config first; it ran softmax and dropped the kernels."""
    model = converted("bert", "AutoModelForMaskedLM")
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    loaded = getattr(transformers, config.architectures[0]).from_pretrained(tmp_path, config=config).eval()
    assert type(loaded) is type(model)
    assert torch.equal(outputs(loaded, inputs_of(model))[0], outputs(model, inputs_of(model))[0])
    for other in (transformers.GPT2Model, transformers.CLIPTextModel):
        with pytest.raises(CheckpointError, match=f"{other.__name__}: got the BertConfig of a converted model"):
            other.from_pretrained(tmp_path, config=config)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_class_of_transformers_is_not_built_from_our_config(name):
    """It would run softmax without a word; the body inside a model with a head is built so, in a converted one."""
    base = original(name)
    config = converted(name).config
    with pytest.raises(CheckpointError, match=f"^{type(base).__name__}: got the .* it would run softmax; expected"):
        type(base)(config)
    with pytest.raises(CheckpointError, match="it would run softmax"):
        type(base)._from_config(config)
    built = transformers.AutoModel.from_config(config)
    assert isinstance(built, LinearizedModel) and linear_attentions(built)
    assert not linear_attentions(type(base)(base.config))


def test_names_of_older_files_are_found(tmp_path):
    """Pickles and adapters of peft name a class of this package by its prefix."""
    from linearize.modeling import config as configs
    from linearize.modeling import model as models

    model = converted("bert", "AutoModelForMaskedLM")
    assert models.LinearizedBertForMaskedLM is models.BertForMaskedLM is type(model)
    assert models.LinearizedBertModelInner is type(model.bert)
    assert configs.LinearizedBertConfig is type(model.config)
    assert repr(type(model)) == "<class 'linearize.modeling.model.LinearizedBertForMaskedLM'>"


def test_saved_code_in_vllm_keeps_the_written_names(tmp_path, monkeypatch):
    """vLLM without the plug-in must not find its own class: a kernel without weights would become softmax."""
    converted("llama", "AutoModelForCausalLM", "elu").save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).architectures == ["LlamaForCausalLM"]
    monkeypatch.setattr(importlib.import_module("linearize.modeling.config"), "_INSTALLED", False)
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    assert AutoConfig.from_pretrained(tmp_path).architectures == ["LinearizedLlamaForCausalLM"]


@pytest.mark.parametrize("name", CONFIGS)
def test_peft_finds_its_default_modules(name):
    peft = pytest.importorskip("peft")
    tables = peft.utils.constants
    kinds = {
        peft.LoraConfig: tables.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING,
        peft.IA3Config: tables.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
    }
    for kind, table in kinds.items():
        stock, model = original(name), converted(name)
        if stock.config.model_type not in table:
            with pytest.raises(ValueError, match="target_modules"):
                peft.get_peft_model(model, kind())
            continue
        expected, tuned = peft.get_peft_model(stock, kind()), peft.get_peft_model(model, kind())
        assert tuned.peft_config["default"].target_modules == expected.peft_config["default"].target_modules
        assert set(tuned.targeted_module_names) == set(expected.targeted_module_names)


def test_an_adapter_finds_its_model_by_the_name_in_its_file(tmp_path):
    peft = pytest.importorskip("peft")
    model = converted("llama", "AutoModelForCausalLM")
    model.save_pretrained(tmp_path / "base")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned = peft.get_peft_model(loaded, peft.LoraConfig(init_lora_weights=False))
    tuned.save_pretrained(tmp_path / "adapter")
    allowed = {"import_allowlist": ["linearize.modeling.model"]}
    again = peft.AutoPeftModel.from_pretrained(tmp_path / "adapter", **allowed).eval()
    assert isinstance(again.get_base_model(), LinearizedModel)
    assert torch.equal(outputs(again, inputs_of(model))[0], outputs(tuned.eval(), inputs_of(model))[0])


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "peft"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_label_smoothing_is_that_of_the_original(name, wrapped, tmp_path):
    """The Trainer shifts the labels only for class names in its table; otherwise a token learns to predict itself."""
    peft = pytest.importorskip("peft")
    arguments = transformers.TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, report_to="none")
    losses = []
    for model in (original(name, "AutoModelForCausalLM"), converted(name, "AutoModelForCausalLM", **EXACT)):
        inputs = inputs_of(model)
        inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        model = peft.get_peft_model(model, peft.LoraConfig()) if wrapped else model
        losses.append(transformers.Trainer(model, arguments).compute_loss(model.eval(), dict(inputs)))
        plain = model(**inputs).loss
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        kept = inputs["labels"][:, 1:] != -100
        uniform = -logits[:, :-1].log_softmax(-1).mean(-1)[kept].mean()
        torch.testing.assert_close(losses[-1], 0.9 * plain + 0.1 * uniform, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)


def test_acting_once_after_an_import(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_module.py").write_text("value = 1\n")
    before, acts = list(sys.meta_path), []
    for _ in range(2):
        when_imported("late_module", lambda: acts.append(sys.modules["late_module"].value))
    assert not acts
    assert isinstance(importlib.import_module("late_module"), types.ModuleType)
    assert acts == [1] and sys.meta_path == before
    when_imported("late_module", lambda: acts.append(2))
    assert acts == [1, 2]
    sys.modules.pop("late_module")


def test_a_composite_keeps_the_names_of_its_parts(tmp_path):
    """Its config.json writes the guard of a converted part, by which it is found again."""
    parts = {}
    for name, model in (("bert", converted("bert")), ("gpt2", original("gpt2", "AutoModelForCausalLM"))):
        model.save_pretrained(tmp_path / name)
        parts[name] = str(tmp_path / name)
    model = transformers.EncoderDecoderModel.from_encoder_decoder_pretrained(parts["bert"], parts["gpt2"])
    assert model.config.encoder.model_type == "bert" and isinstance(model.encoder, LinearizedModel)
    model.save_pretrained(tmp_path / "both")
    values = json.loads((tmp_path / "both" / "config.json").read_text())
    assert values["encoder"]["model_type"] == "linearize" and values["decoder"]["model_type"] == "gpt2"
    assert values["encoder"]["architectures"] == ["LinearizedBertModel"]
    loaded = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "both")
    assert isinstance(loaded.encoder, LinearizedModel) and loaded.config.encoder.model_type == "bert"


def test_the_script_lists_who_asks():
    listing = script("name_consumers")
    root = Path(transformers.__file__).parent
    found = {kind for kind, _, _ in listing.consumers(root / "pipelines" / "automatic_speech_recognition.py")}
    assert found == {"class name", "model_type", "table of names"}
    assert "architectures" in {kind for kind, _, _ in listing.consumers(root / "pipelines" / "base.py")}
    # A message only prints a name.
    assert not any("raise" in line for _, _, line in listing.consumers(root / "trainer.py"))
