"""The loss and the gradient of a step are means over its rows or tokens, whatever the trainer and the model do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.tasks import WORDS, causal_folder, write
from support.tiny import original
from test_half_precision import opened
from transformers import Trainer

import linearize
from linearize.checkpoint.loading import load_processor
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.load import load_for_task
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.tasks import task
from linearize.training.stage_two.trainer import finetune

ONE = TuneConfig(
    learning_rate=1e-3, batch_size=12, steps=3, dropout=0.0, selection_rows=0, eval_every=3, log_every=1,
    schedule="constant", warmup=0.0, teacher_hidden_weight=0.0, labels_from=0.0, labels_ramp=0.0,
)  # fmt: skip
MANY = replace(ONE, batch_size=3, gradient_accumulation=4)


def older_step(self, model, inputs, num_items_in_batch=None):
    """A step of transformers before 5.20, which knows no `loss_is_scaled_for_ga`."""
    model.train()
    inputs = self._prepare_inputs(inputs)
    with self.compute_loss_context_manager():
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
    if (not self.model_accepts_loss_kwargs or num_items_in_batch is None) and self.compute_loss_func is None:
        loss = loss / self.current_gradient_accumulation_steps
    self.accelerator.backward(loss)
    return loss.detach()


def older_count(self, batches, device):
    """It counted the first token of a row too, which is never predicted."""
    counts = self.model_accepts_loss_kwargs and "labels" in batches[0]
    return sum(batch["labels"].ne(-100).sum() for batch in batches).to(device) if counts else None


@pytest.fixture(params=["newest", "older"])
def trainer(request, monkeypatch):
    if request.param == "older":
        monkeypatch.setattr(Trainer, "training_step", older_step)
        monkeypatch.setattr(Trainer, "_get_num_items_in_batch", older_count)


def same_steps(make, data, tmp_path, **more):
    """Steps of four batches have the loss and the gradient of steps of one batch with all their rows."""
    found = []
    for number, config in enumerate((ONE, MANY)):
        given = {name: load() for name, load in more.items()}
        history = finetune(make(), data, config, folder=tmp_path / str(number), **given).history
        found += [[entry[name] for entry in history if name in entry] for name in ("loss", "grad_norm")]
    assert len(found[0]) == 3
    assert found[2] == pytest.approx(found[0], rel=2e-3) and found[3] == pytest.approx(found[1], rel=1e-2)


@pytest.mark.sampled("pairs")
@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize(
    "kind", ["language:CausalLanguage", "language:Copying", "language:Recall", "text:TextRegression"]
)
def test_a_step_of_several_batches_is_a_step_of_one(kind, taught, trainer, tmp_path):
    folder, data = opened(kind, tmp_path)

    def make():
        return linearize.convert(load_for_task(folder, data).float(), "hedgehog")

    def teach():
        return load_for_task(folder, data, seed=4).float()

    same_steps(make, data, tmp_path, **({"teacher": teach} if taught else {}))


@pytest.mark.parametrize("name", ["bart", "llama"])
def test_models_that_ignore_the_count_or_do_not_shift(name, trainer, tmp_path):
    """BART's decoder took G times the mean, of losses of predicting each token from itself."""
    folder = causal_folder(tmp_path / "llama", 32)
    write(tmp_path / "rows.jsonl", [{"text": " ".join(WORDS)} for _ in range(60)])
    processor = load_processor(str(folder), "text")
    data = prepare(task("causal-lm"), processor, DataOptions(max_length=16), data=str(tmp_path / "rows.jsonl"))
    still = {"dropout": 0.0} if name == "bart" else {}

    def make():
        return original(name, "AutoModelForCausalLM", vocab_size=17, **still)

    same_steps(make, data, tmp_path)
    model = make()
    batch = data.collate([data.train[0], data.train[1]])
    logits = model(batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    expected = -logits.gather(-1, batch["input_ids"][:, 1:, None]).mean()
    found = data.type.label_loss(model(batch["input_ids"]), batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
