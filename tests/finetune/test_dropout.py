"""`dropout` of stage two: every share of a model that is dropped, for as long as it is tuned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.tiny import original
from torch import nn

import linearize
from linearize.checkpoint.loading import load_processor
from linearize.training.adapters import LoraConfig, add_lora
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.load import load_for_task
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.tasks import task
from linearize.training.stage_two.trainer import dropping, finetune, places
from linearize.training.stage_two.tuner import Tuner

CONFIG = TuneConfig(learning_rate=1e-3, batch_size=8, steps=6, log_every=1)
HALF, NONE = (dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), share) for share in (0.5, 0.0))


def test_no_dropout_is_a_model_made_without(bert, glue, tmp_path):
    data = prepare(task("cola"), load_processor(bert, "text"), DataOptions(max_length=16), data=str(glue))
    losses = []
    for number, (changes, share) in enumerate([(HALF, None), (HALF, 0.0), (NONE, None), (NONE, 0.5)]):
        model = load_for_task(bert, data, changes=changes)
        config = replace(CONFIG, dropout=share)
        result = finetune(model, data, config, folder=tmp_path / str(number))
        losses.append([entry["loss"] for entry in result.history if "loss" in entry])
        shares = {getattr(module, name) for module, name in places(model)}
        assert shares == set(changes.values()), "it is restored"
    dropped, not_dropped, never, made_to = losses
    assert not_dropped == never != dropped == made_to


@pytest.mark.parametrize(
    ("options", "share"),
    [({}, 0.5), ({"labels_weight": 0}, 0.0), ({"labels_from": 1}, 0.0), ({"labels_weight": 0, "dropout": 0.25}, 0.25)],
)
def test_what_a_teacher_alone_teaches_drops_nothing(bert, glue, tmp_path, monkeypatch, options, share):
    data = prepare(task("cola"), load_processor(bert, "text"), DataOptions(max_length=16), data=str(glue))
    teacher, model = (load_for_task(bert, data, changes=HALF, seed=seed) for seed in (0, 1))
    model = linearize.convert(model, "elu")
    seen = set()
    step = Tuner.training_step
    shares = places(model)

    def looking(self, *args, **kwargs):
        seen.update(getattr(module, name) for module, name in shares)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Tuner, "training_step", looking)
    config = replace(CONFIG, steps=1, **options)
    finetune(model, data, config, folder=tmp_path / "work", teacher=teacher)
    assert seen == {share}


@pytest.mark.parametrize("name", ["bert", "bart", "gpt2", "vit", "llama"])
def test_nothing_is_dropped(name):
    drops = {
        "bart": {"dropout": 0.3, "attention_dropout": 0.3, "activation_dropout": 0.3},
        "llama": {"attention_dropout": 0.3},
    }
    model = original(name, "AutoModel", **drops.get(name, {})).train()
    ids = torch.randint(5, 15, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs = {"pixel_values": torch.rand(2, 3, 30, 30)} if name == "vit" else {"input_ids": ids}
    for module, attribute in places(model):
        setattr(module, attribute, 0.3)
    assert places(model)
    with dropping(model, 0.0):
        one, two = (model(**inputs)[0] for _ in range(2))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert {getattr(module, attribute) for module, attribute in places(model)} == {0.3}
    one, two = (model(**inputs)[0] for _ in range(2))
    assert not torch.equal(one, two)


def test_low_rank_updates_keep_their_own():
    model = original("bert", "AutoModel")
    add_lora(model, LoraConfig(dropout=0.25))
    with dropping(model, 0.0):
        shares = {
            module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout) and "lora_" in name
        }
    assert shares == {0.25}
