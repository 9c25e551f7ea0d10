"""Rows held out of training choose the kept state, validation rows never do; new pairs of the training texts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.scripts import script
from support.tasks import WORDS, measured, write
from transformers import EarlyStoppingCallback, TrainerControl

from linearize.checkpoint.loading import load_processor
from linearize.core.errors import DataError
from linearize.data.records import paired_anew
from linearize.training.adapters import LoraConfig
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.load import load_for_task
from linearize.training.stage_two.metrics import label_losses
from linearize.training.stage_two.prepare import hold_out, prepare, selection_size
from linearize.training.stage_two.rows import IGNORED
from linearize.training.stage_two.tasks import task
from linearize.training.stage_two.trainer import finetune
from linearize.training.stage_two.tuner import Tuner

SHORT = DataOptions(max_length=16)


def data_for(name, folder, path, options=SHORT):
    return prepare(task(name), load_processor(folder, task(name).modality), options, data=str(path))


@pytest.mark.parametrize(
    ("rows", "expected"), [(64, 12), (160, 32), (1_000, 50), (3_668, 183), (100_000, 500), (4, 1), (2, 1)]
)
def test_how_many_are_held_out(rows, expected):
    assert selection_size(rows) == expected


def test_rows_are_parted_by_the_seed(bert, glue):
    data = data_for("cola", bert, glue)
    one, again, other = (hold_out(data, seed=seed) for seed in (3, 3, 4))
    assert one.train.places == again.train.places and one.selection.places == again.selection.places
    assert one.selection.places != other.selection.places
    assert sorted(one.train.places + one.selection.places) == list(range(64))
    assert len(one.selection) == 12 and len(hold_out(data, 20).selection) == 20
    assert hold_out(one, 20) is one and hold_out(data, 0) is data
    with pytest.raises(DataError, match="got 64 rows to train on and 64 to choose"):
        hold_out(data, 64)


def test_rows_of_one_question_stay_together(bert, glue):
    data = data_for("cola", bert, glue)
    rows = [{**data.train[place], "owner": place // 4} for place in range(64)]
    held = hold_out(replace(data, train=rows), 5)
    owners = {rows[place]["owner"] for place in held.selection.places}
    # Five rows are two questions: every row drew its own question, so up to five were held out, a third of the data.
    assert len(owners) == 2 and len(held.selection) == 8
    assert not owners & {rows[place]["owner"] for place in held.train.places}


def test_nothing_is_random_in_held_out_rows(bert, glue):
    data = data_for("cola", bert, glue)
    rows = [{**data.train[place], "augment": True, "fixed": False} for place in range(64)]
    held = hold_out(replace(data, train=rows))
    assert not held.selection[0]["augment"] and held.selection[0]["fixed"]
    assert held.train[0]["augment"] and not held.train[0]["fixed"]


def turned(rows):
    return [{**rows[place], "labels": 1 - rows[place]["labels"]} for place in range(len(rows))]


@pytest.mark.parametrize("which", ["validation", pytest.param("selection", marks=pytest.mark.slow)])
def test_what_is_kept_depends_on_the_held_out_rows_alone(bert, glue, tmp_path, which):
    """With the labels of the validation rows turned round the same weights are kept, with other figures."""
    config = TuneConfig(learning_rate=1e-2, batch_size=8, epochs=4, log_every=100, seed=1)
    kept = []
    for turn in (False, True):
        data = hold_out(data_for("cola", bert, glue), seed=1)
        if turn:
            data = replace(data, **{which: turned(getattr(data, which))})
        model = load_for_task(bert, data)
        kept.append((model, finetune(model, data, config, folder=tmp_path / str(turn))))
    (one, first), (two, second) = kept
    assert first.metrics["matthews"] == 1.0
    if which == "selection":
        assert first.best_step != second.best_step
        return
    assert second.metrics["matthews"] == -1.0
    assert first.best_step == second.best_step and first.selection == second.selection
    assert all(map(torch.equal, one.state_dict().values(), two.state_dict().values()))


def test_the_selection_figure_is_the_mean_loss_of_the_held_out_rows(bert, glue, tmp_path):
    data = data_for("stsb", bert, glue)
    model = load_for_task(bert, data)
    config = TuneConfig(learning_rate=1e-3, batch_size=8, eval_batch_size=5, epochs=2)
    result = finetune(model, data, config, folder=tmp_path / "work")
    held = hold_out(data, seed=config.seed).selection
    batch = data.collate([held[place] for place in range(len(held))])
    with torch.no_grad():
        expected = float(
            (model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, 0] - batch["labels"]).pow(2).mean()
        )
    assert result.selection == {
        "by": "loss", "on": "rows held out of the training rows", "rows": 12, "value": pytest.approx(expected, rel=1e-5)
    }  # fmt: skip
    assert set(result.metrics) == {"pearson", "spearman"}
    assert all("eval_score" in entry for entry in result.history if "eval_selection" in entry and entry["step"])


def too_fast(**options):
    """A rate at which nothing comes out better than what it began with."""
    return TuneConfig(learning_rate=100.0, schedule="constant", warmup=0, batch_size=8, epochs=3, **options)


@pytest.mark.parametrize("lora", [None, pytest.param(LoraConfig(r=2), marks=pytest.mark.slow)], ids=["full", "lora"])
def test_what_it_began_with_is_kept_where_nothing_is_better(bert, glue, tmp_path, lora):
    data = data_for("stsb", bert, glue)
    model = load_for_task(bert, data)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = measured(model, data, tmp_path, 64)
    for seed in range(8):
        # At such a rate, some state may come out better by chance, and on which seed depends on the processor.
        result = finetune(model, data, too_fast(lora=lora, seed=seed), folder=tmp_path / f"work-{seed}")
        values = {entry["step"]: entry["eval_selection"] for entry in result.history if "eval_selection" in entry}
        assert result.best_step == min(values, key=values.__getitem__) and len(values) > 2
        if result.best_step == 0:
            break
        model = load_for_task(bert, data)
    assert result.best_step == 0 < result.steps and result.metrics == pytest.approx(expected, abs=1e-4)
    assert values[0] == result.selection["value"]
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], value) for name, value in before.items())


def test_it_is_kept_over_a_resume_too(bert, glue, tmp_path):
    data = data_for("stsb", bert, glue)

    def stop(entry):
        if entry["step"] == 10 and "eval_loss" in entry:
            raise KeyboardInterrupt

    config = too_fast(eval_every=5)
    with pytest.raises(KeyboardInterrupt):
        finetune(load_for_task(bert, data), data, config, folder=tmp_path / "work", on_log=stop)
    assert {path.name for path in (tmp_path / "work").glob("checkpoint-*")} == {"checkpoint-0", "checkpoint-5"}
    (again, result), (whole, expected) = (
        (model, finetune(model, data, config, folder=tmp_path / name, resume=resume))
        for model, name, resume in (
            (load_for_task(bert, data), "work", True),
            (load_for_task(bert, data), "whole", False),
        )
    )
    assert result.best_step == expected.best_step == 0 and result.selection == expected.selection
    assert all(map(torch.equal, again.state_dict().values(), whole.state_dict().values()))


def test_looking_at_the_start_changes_nothing_of_the_training(bert, glue, tmp_path, monkeypatch):
    data = data_for("cola", bert, glue)
    config = TuneConfig(learning_rate=1e-2, batch_size=8, epochs=2, seed=1)
    kept = []
    for look in (True, False):
        if not look:
            monkeypatch.setattr(Tuner, "keep_start", lambda self: None)
        model = load_for_task(bert, data)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        kept.append((model, finetune(model, data, config, folder=tmp_path / str(look))))
    (one, first), (two, second) = kept
    assert first.best_step == second.best_step > 0
    assert all(map(torch.equal, one.state_dict().values(), two.state_dict().values()))


def test_early_stopping_looks_at_the_held_out_rows(bert, glue, tmp_path):
    config = TuneConfig(learning_rate=1e-1, schedule="constant", batch_size=8, epochs=30, patience=2)
    data = data_for("cola", bert, glue)
    result = finetune(load_for_task(bert, data), data, config, folder=tmp_path / "work")
    measured = [entry for entry in result.history if "eval_selection" in entry and entry["step"]]
    lowest = min(measured, key=lambda entry: entry["eval_selection"])
    most = lowest["eval_selection"] + lowest["eval_selection_error"]
    kept = [entry for entry in measured if entry["eval_selection"] <= most][-1]
    assert result.stopped == "early stopping" and lowest is measured[-3]
    assert (result.best_step, result.selection["value"]) == (kept["step"], kept["eval_selection"])


@pytest.mark.parametrize(
    "losses, errors, kept",
    [
        ((0.7, 0.5, 0.4, 0.45, 0.55), (0.1, 0.1, 0.1, 0.1, 0.1), 3),  # 0.45 is within 0.1 of 0.4, 0.55 is not.
        ((0.7, 0.5, 0.4, 0.45, 0.55), (0.1, 0.1, 0.2, 0.1, 0.1), 4),
        ((0.7, 0.5, 0.4, 0.45, 0.55), (None,) * 5, 2),
        ((0.4, 0.5, 0.41, 0.45, 0.55), (0.5, 0.5, 0.5, 0.5, 0.5), 0),  # The start is the lowest: nothing replaces it.
        ((0.4, 0.5, 0.39, 0.45, 0.3), (0.5, 0.5, 0.01, 0.5, 0.5), 4),
    ],
)
def test_the_latest_state_within_one_standard_error_is_kept(losses, errors, kept):
    """The lowest loss on few rows kept untuned models: 69 % of a set of documents instead of 81 %."""
    state = SimpleNamespace(log_history=[], global_step=0, best_metric=losses[0], best_global_step=0)
    trainer = SimpleNamespace(state=state, selection=[])
    for step, (loss, error) in enumerate(zip(losses, errors, strict=True)):
        entry = {"eval_selection": loss} | ({} if error is None else {"eval_selection_error": error})
        state.log_history.append({**entry, "step": step})
        state.global_step = step
        if step:
            Tuner._determine_best_metric(trainer, entry, None)
    assert (state.best_global_step, state.best_metric) == (kept, min(losses))


def test_patience_compares_with_the_lowest_loss():
    """Compared with the kept state's loss, which rises within the error, losses that go up and down never stopped."""
    losses = (0.7, 0.5, 0.52, 0.51, 0.52, 0.51)
    state = SimpleNamespace(log_history=[], global_step=0, best_metric=losses[0], best_global_step=0)
    trainer, stopping = SimpleNamespace(state=state, selection=[]), EarlyStoppingCallback(3)
    args = SimpleNamespace(greater_is_better=False, metric_for_best_model="selection")
    control = TrainerControl()
    for step, loss in enumerate(losses):
        entry = {"eval_selection": loss, "eval_selection_error": 0.05}
        state.log_history.append({**entry, "step": step})
        state.global_step = step
        if step and not control.should_training_stop:
            stopping.on_evaluate(args, state, control, entry)
            Tuner._determine_best_metric(trainer, entry, None)
    assert control.should_training_stop and state.best_global_step == 4


def test_the_script_that_compares_rules_knows_the_rule(bert, glue, tmp_path, monkeypatch):
    module, output = script("state_choice"), tmp_path / "out.json"
    monkeypatch.setattr(module, "JOBS", {"cola": ("cola", SHORT, 3), "mrpc": ("mrpc", SHORT, 2)})
    module.main([bert, "--data", str(glue), "--seeds", "0", "--output", str(output)])
    runs = json.loads(output.read_text())["runs"]
    assert [(run["task"], len(run["evaluations"])) for run in runs] == [("cola", 3), ("mrpc", 2)]
    for run in runs:
        kept = module.within_error(run["evaluations"])
        assert run["kept"] in (0, kept["step"]) and run["scores"]["latest within one standard error"] == kept["score"]
        assert all(entry["calibrated"] <= entry["loss"] + 1e-9 for entry in run["evaluations"])
    module.main([bert, "--data", str(glue), "--seeds", "0", "--output", str(output)])
    assert json.loads(output.read_text())["runs"] == runs


def test_losses_of_labels_are_those_at_the_best_temperature():
    chance = np.random.default_rng(3)
    logits, labels = chance.normal(size=(40, 3)), chance.integers(3, size=40)
    logits[np.arange(40), labels] += 1.0

    def losses(factor):
        scaled = factor * logits
        return np.log(np.exp(scaled).sum(axis=1)) - scaled[np.arange(40), labels]

    best = min((losses(factor) for factor in np.exp(np.linspace(-3, 3, 6001))), key=np.mean)
    for factor in (0.3, 1.0, 5.0):
        found = label_losses(factor * logits, labels)
        assert found["excess"] == pytest.approx(losses(factor).mean() - best.mean(), abs=1e-6) and found["excess"] >= 0
        assert found["error"] == pytest.approx(best.std() / 40**0.5, rel=1e-3)
    # A model that is always right, and one that knows nothing.
    assert label_losses(np.eye(3)[labels], labels)["error"] < 1e-6
    assert label_losses(np.zeros((40, 3)), labels) == pytest.approx({"excess": 0.0, "error": 0.0}, abs=1e-12)
    numbers, true = chance.normal(size=(40, 1)).astype(np.float32), chance.normal(size=40).astype(np.float32)
    squares = (numbers[:, 0].astype(np.float64) - true) ** 2
    assert label_losses(numbers, true) == pytest.approx({"excess": 0.0, "error": squares.std() / 40**0.5})


def test_pairs_are_made_anew_by_the_seed():
    firsts = [f"the {word} was good" for word in WORDS]
    seconds = [f"a {word} is bad" for word in WORDS]
    made = paired_anew(firsts, seconds, 30, 5)
    assert made == paired_anew(firsts, seconds, 30, 5) != paired_anew(firsts, seconds, 30, 6)
    assert len(made) == 30 and all(one != two for one, two in made)
    assert {one for one, _ in made} == set(range(12)), "every row takes part"
    assert paired_anew(firsts, ["same"] * 12, 5, 0) == [] == paired_anew(["a"], ["b"], 3, 0)
    assert len(paired_anew(["?", "!"], ["...", "--"], 4, 0)) == 4, "texts without words are paired as well"


def test_half_of_the_pairs_made_anew_share_words():
    firsts = [f"alpha{n} beta{n} gamma{n}" for n in range(40)]
    seconds = [f"delta{n} alpha{(n + 1) % 40} epsilon{n}" for n in range(40)]
    made = paired_anew(firsts, seconds, 40, 0)
    shared = [bool(set(firsts[one].split()) & set(seconds[two].split())) for one, two in made]
    near = sum(two == (one - 1) % 40 for one, two in made)
    assert near >= 3 and sum(shared) == near, "the one row that shares a word is found among the nearest"


@pytest.mark.parametrize("name", ["mrpc", "stsb"])
def test_rows_made_anew_have_no_label_and_no_held_out_text(bert, glue, name):
    data = data_for(name, bert, glue, replace(SHORT, extra_pairs=1.5))
    assert len(data.extra) == 96 and "96 new pairs" in data.description
    split = hold_out(data)
    held = set(split.selection.places)
    assert 0 < len(split.extra) < 96 and not any(held & set(row["sources"]) for row in split.extra)
    batch = data.collate([data.train[0], data.extra[0]])
    label = batch["labels"][1]
    assert math.isnan(label) if name == "stsb" else label == IGNORED
    assert int((batch["input_ids"][1] == 3).sum()) == 2, "both texts are there"
    first = data.extra[0]["sources"][0]
    end = data.train[first]["input_ids"].index(3)
    assert data.extra[0]["input_ids"][: end + 1] == data.train[first]["input_ids"][: end + 1]


def test_a_set_too_small_to_hold_rows_out(bert, tmp_path):
    write(tmp_path / "rows.jsonl", [{"text": "good film", "label": n % 2} for n in range(2)])
    named = task("text-classification", labels=("0", "1"))
    data = prepare(named, load_processor(bert, "text"), SHORT, data=str(tmp_path / "rows.jsonl"))
    with pytest.raises(DataError, match="lower selection_rows"):
        hold_out(data)
