"""A save changes nothing of the model in memory; what a run sets from its data is trained, measured and saved."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.checkpoints import make_text, texts
from support.tiny import converted, inputs_of, outputs, stir
from support.training import Fixed, batches

import linearize
from linearize.attention.interface import linear_attentions
from linearize.checkpoint.fingerprint import check_same, fingerprint, kernels_of
from linearize.checkpoint.loading import load_processor
from linearize.conversion.plan import change_hybrids, set_trained_length
from linearize.core.errors import CheckpointError
from linearize.core.registry import HYBRID
from linearize.modeling.model import check_checkpoint
from linearize.modeling.plan import Plan
from linearize.training.alignment.config import AlignConfig
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.load import load_for_task
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.save import save_model
from linearize.training.stage_two.tasks import task
from linearize.training.stage_two.trainer import finetune

CAUSAL = "AutoModelForCausalLM"
FADING = {"window": 3, "scale": "linear"}
VALUES = {
    "window": 5,
    "sinks": 2,
    "exact_keys": 2,
    "scale": "network",
    "softmax_heads": {0: (1,), 1: (0, 3)},
    "trained_length": 6,
    "routed_blocks": "2:2",
    "routed_heads": (0, 3),
}


def model_of(name="llama", head=CAUSAL, **options):
    routed = options.pop("routed_heads", ())
    model = converted(name, head, **FADING | options | ({"routed_blocks": VALUES["routed_blocks"]} if routed else {}))
    layers = Plan.from_dict(model.config.linearize).converted
    if routed:
        change_hybrids(
            model, {layer.module: dataclasses.replace(layer.hybrid, routed_heads=routed) for layer in layers}
        )
    return stir(model)


def lengths(model):
    return {layer.hybrid.trained_length for layer in linear_attentions(model).values()}


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True)) and len(one) == len(other)


WAYS = {
    "save": lambda model, folder: linearize.save(model, folder, provenance={"longest_row": 999}),
    "save again": lambda model, folder: [linearize.save(model, folder, overwrite=True) for _ in range(2)],
    "tuned": lambda model, folder: save_model(
        model, folder, None, stage={"finetuning": {"max_length": 999, "task": "sst2"}}
    ),
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "by keyword": lambda model, folder: model.save_pretrained(save_directory=folder),
    "in parts": lambda model, folder: model.save_pretrained(folder, max_shard_size="20KB"),
    "the body": lambda model, folder: model.base_model.save_pretrained(folder),
}


@pytest.mark.sampled("values")
@pytest.mark.parametrize("way", [*WAYS, "the trainer"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_save_changes_nothing_in_memory(way, name, tmp_path):
    model = model_of(name, "AutoModel" if name == "bert" else CAUSAL)
    if name != "bert":
        set_trained_length(model, 6)
    model.config.linearize["provenance"] = {"longest_row": 6, "seed": 3}
    inputs = inputs_of(model, tokens=20)
    # Making a trainer changes `use_cache`.
    options = transformers.TrainingArguments(output_dir=str(tmp_path / "runs"), report_to="none", use_cpu=True)
    trainer = transformers.Trainer(model=model, args=options)
    facts = copy.deepcopy([vars(model.config), getattr(model, "generation_config", None), model.training])
    state, before = copy.deepcopy(model.state_dict()), outputs(model, inputs)
    config, kind = model.config, type(model)
    WAYS.get(way, lambda model, folder: trainer.save_model(str(folder)))(model, tmp_path / "saved")
    assert model.config is config is model.base_model.config and type(model) is kind
    assert repr([vars(model.config), getattr(model, "generation_config", None), model.training]) == repr(facts)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert equal(outputs(model, inputs), before)
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "saved").eval()
    assert equal(outputs(loaded, inputs), outputs(model.base_model, inputs))


@pytest.mark.parametrize("variant", [None, "fp32"])
def test_a_save_over_older_weights_is_what_is_loaded(variant, tmp_path):
    """In shards over one file, transformers left the older file there, and loaded it."""
    forms = {"one file": "1GB", "few shards": "30KB", "more shards": "20KB"}
    for before, after in itertools.permutations(forms, 2):
        model, folder = model_of(), tmp_path / f"{before} then {after}"
        model.save_pretrained(folder, max_shard_size=forms[before], variant=variant)
        stir(model)
        # The same arguments by their places.
        model.save_pretrained(folder, True, None, False, forms[after], variant)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, variant=variant).eval()
        inputs = inputs_of(model)
        assert equal(outputs(loaded, inputs), outputs(model, inputs)), (before, after)
        indices, files = (list(folder.glob(name)) for name in ("*index*.json", "*.safetensors"))
        assert (len(indices), len(files) > 1) == ((0, False) if after == "one file" else (1, True))


@pytest.mark.parametrize("shards", ["1GB", "20KB"])
def test_the_weights_of_a_variant_are_checked(shards, tmp_path):
    """Only those of the usual name were; of others, missing ones were drawn at random, with no more than a warning."""
    model_of().save_pretrained(tmp_path, max_shard_size=shards, variant="fp32")
    for file in tmp_path.glob("*.safetensors"):
        weights = {key: tensor for key, tensor in load_file(file).items() if key != "model.norm.weight"}
        save_file(weights, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"the weights file lacks 'model\.norm\.weight'"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, variant="fp32")
    with pytest.raises(CheckpointError, match=r"the weights file lacks 'model\.norm\.weight'"):
        check_checkpoint(tmp_path, variant="fp32")


@pytest.mark.sampled("values")
@pytest.mark.parametrize("field", HYBRID)
@pytest.mark.parametrize("stage", ["stage one", "alignment"])
def test_longer_rows_set_the_trained_length_before_they_are_read(field, stage, tmp_path):
    """A saved causal hybrid was trained and measured with the fade of its old rows, and stored with that of its new."""
    assert set(VALUES) == set(HYBRID), "give the new addition a value"
    options = {} if field == "trained_length" else {field: VALUES[field]}
    model = model_of(**options)
    set_trained_length(model, VALUES["trained_length"])
    inputs, data = inputs_of(model, tokens=20), Fixed(batches(model, 2))
    was = outputs(model, inputs)
    seen = set()
    for layer in linear_attentions(model).values():
        layer.register_forward_pre_hook(lambda layer, *_: seen.add(layer.hybrid.trained_length))
    if stage == "stage one":
        linearize.distill(model, data, DistillConfig(steps=1, eval_every=1))
    else:
        linearize.align(model, data, AlignConfig(steps=2, eval_every=1))
    assert lengths(model) == {12} and seen <= {12}
    model.eval()
    live = outputs(model, inputs)
    assert not torch.allclose(live[0][:, 12:], was[0][:, 12:])
    linearize.save(model, tmp_path / "saved", provenance={"longest_row": 12})
    assert equal(outputs(model, inputs), live)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert lengths(loaded) == {12} and equal(outputs(loaded, inputs), live)
    assert Plan.from_dict(loaded.config.linearize) == Plan.from_dict(model.config.linearize)


def test_tuning_on_longer_rows_sets_the_trained_length(tmp_path):
    """Also where the longest row is one to train on, and those to measure on are short."""
    make_text(tmp_path / "linear", "llama", head="AutoModelForSequenceClassification", **FADING)
    name, rows = str(tmp_path / "linear"), texts(tmp_path, 24)
    data = prepare(
        task("text-classification", columns=("text",)), load_processor(name, "text"), DataOptions(max_length=48),
        data=str(rows),
    )  # fmt: skip
    data = dataclasses.replace(data, validation=sorted(data.validation, key=lambda row: len(row["input_ids"]))[:2])
    model = load_for_task(name, data)
    set_trained_length(model, 6)
    longest = max(len(row["input_ids"]) for row in data.train)
    assert longest > max(len(row["input_ids"]) for row in data.validation)
    seen = set()
    for layer in linear_attentions(model).values():
        layer.register_forward_pre_hook(lambda layer, *_: seen.add(layer.hybrid.trained_length))
    finetune(model, data, TuneConfig(steps=1, batch_size=4, selection_rows=4), folder=tmp_path / "work")
    assert lengths(model) == {longest} and seen <= {longest}


def test_a_checkpoint_that_recorded_only_its_rows_does_not_get_shorter_ones():
    """Those from before the fade have no trained length, but a record of the rows of their stages."""
    for record in ({"longest_row": 17}, {"longest_row": 3, "finetuning": {"max_length": 17}}):
        model = model_of()
        model.config.linearize["provenance"] = record
        linearize.distill(model, Fixed(batches(model, 2)), DistillConfig(steps=0))
        assert lengths(model) == {17}


def test_a_run_that_an_earlier_version_started_can_be_resumed():
    """Its fingerprint has the trained length of the checkpoint it started from, or none."""
    model = model_of(sinks=1)
    plain = fingerprint(model=model)
    set_trained_length(model, 6)
    now = fingerprint(model=model)
    assert now == plain
    older = copy.deepcopy(now)
    for kernel in older["kernels"].values():
        kernel[-1]["trained_length"] = 6
    check_same(older, now)
    assert kernels_of(model) == now["kernels"]
