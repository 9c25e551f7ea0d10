"""Stage two end to end on tiny models: every kind of task, resume, low-rank updates, bad input."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import types
from dataclasses import replace
from pathlib import Path

import accelerate.tracking
import numpy as np
import pytest
import torch
from accelerate.utils import LoggerType
from safetensors.torch import load_file, save_file
from support.tasks import WORDS, measured, photos, write
from support.tiny import original

import linearize
from linearize.checkpoint.loading import load_processor
from linearize.checkpoint.provenance import LOG, STAGE_ONE, log_file, read_log
from linearize.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LinearizeError,
    TrainingError,
    UnknownNameError,
)
from linearize.jobs.advice import after_tuning
from linearize.jobs.config import InitJob
from linearize.jobs.evaluate import evaluate_checkpoint
from linearize.jobs.events import Logged
from linearize.jobs.finetune import finetune_checkpoint
from linearize.jobs.init import init_checkpoint
from linearize.jobs.task_config import EvaluateJob, TuneJob
from linearize.training.adapters import LoraConfig, add_lora, merge_lora, parse_lora, target_modules
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.load import check_trained, load_for_task, usual_length
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.save import last_checkpoint
from linearize.training.stage_two.task_types.language import strided
from linearize.training.stage_two.tasks import TASKS, recovery, task
from linearize.training.stage_two.trainer import finetune
from linearize.training.stage_two.tuner import Tuner

SHORT = DataOptions(max_length=16)
FAST = TuneConfig(learning_rate=5e-3, batch_size=16, epochs=2, log_every=2)
LAST = {"selection_rows": 0}
"""What was trained is kept, whether it is better than the start or not: there is one evaluation, at the end."""


def data_for(name, folder, path, options=SHORT, **changes):
    chosen = task(name, **changes)
    return prepare(chosen, load_processor(folder, chosen.modality), options, data=str(path))


def tune(name, folder, path, tmp_path, config=FAST, options=SHORT, **changes):
    data = data_for(name, folder, path, options, **changes)
    model = load_for_task(folder, data)
    return model, data, finetune(model, data, config, folder=tmp_path / "work")


def test_cola_is_learned_and_saved(bert, glue, tmp_path, monkeypatch):
    def measuring(history, seconds, rows):
        times.append(sum(entry.get("eval_runtime", 0.0) for entry in history))

    times, logged = [], []
    monkeypatch.setattr("linearize.jobs.finetune.long_measuring", measuring)
    job = TuneJob(
        bert,
        task("cola"),
        str(glue),
        str(tmp_path / "out"),
        data=SHORT,
        tune=TuneConfig(learning_rate=1e-2, epochs=10, batch_size=8, seed=1),
    )
    target, result = finetune_checkpoint(job, lambda event: logged.append(event) if isinstance(event, Logged) else None)
    assert result.metrics["matthews"] == result.score == 1.0
    # All measurements, also of the kept state at the end, which the history does not have.
    entries = [event.entry for event in logged if "eval_runtime" in event.entry]
    assert times == [pytest.approx(sum(entry["eval_runtime"] for entry in entries))]
    assert len(entries) == 1 + sum("eval_runtime" in entry for entry in result.history)
    record = json.loads((target / "finetuning.json").read_text())
    assert record["metrics"]["matthews"] == 1.0 and str(glue) not in json.dumps(record)
    assert not (tmp_path / "out.training").exists()
    again = evaluate_checkpoint(EvaluateJob(str(target), task("cola"), str(glue), compare=str(target), data=SHORT))
    assert again.score == 1.0 and again.recovered == 100.0
    assert again.chance == 0.0 and again.interval == again.sides[1].interval == (1.0, 1.0)
    rows = len(data_for("cola", bert, glue).validation)
    # Words, none of them in pieces, and two special tokens.
    longest = 2 + max(len(json.loads(line)["sentence"].split()) for line in (glue / "cola/validation.jsonl").open())
    assert again.facts == {"rows": rows, "max_length": 16, "longest_row": longest, "cut_share": 0.0}
    assert record["max_length"] == 16 == usual_length(str(target), 128) and usual_length(bert, 128) == 32
    model = load_for_task(str(target), data_for("cola", bert, glue))
    assert model.config.id2label == {0: "unacceptable", 1: "acceptable"}


def test_pairs_have_two_metrics(bert, glue, tmp_path):
    _, data, result = tune("mrpc", bert, glue, tmp_path)
    assert result.score == pytest.approx((result.metrics["accuracy"] + result.metrics["f1"]) / 2)
    assert int((data.collate([data.train[0]])["input_ids"] == 3).sum()) == 2, "both texts are there"


def test_pairs_under_usual_names_are_found(bert, glue):
    data = data_for("text-classification", bert, glue / "mrpc")
    assert int((data.collate([data.train[0]])["input_ids"] == 3).sum()) == 2


def test_regression(bert, glue, tmp_path):
    model, _, result = tune(
        "stsb", bert, glue, tmp_path, TuneConfig(learning_rate=1e-2, epochs=20, eval_every=70, batch_size=8)
    )
    assert model.config.problem_type == "regression" and model.config.num_labels == 1
    assert result.score == pytest.approx((result.metrics["pearson"] + result.metrics["spearman"]) / 2)
    assert result.score > 0.7


def test_any_text_classification_takes_names_and_holds_rows_out(bert, tmp_path):
    rows = [{"review": f"{'good' if i % 2 else 'bad'} film", "mood": "up" if i % 2 else "down"} for i in range(40)]
    write(tmp_path / "reviews.jsonl", rows)
    changes = {"columns": ("review",), "label": "mood"}
    model, data, result = tune("text-classification", bert, tmp_path / "reviews.jsonl", tmp_path, **changes)
    assert data.task.labels == ("down", "up") and model.config.id2label[1] == "up"
    assert len(data.train) == 36 and len(data.validation) == 4
    assert set(result.metrics) == {"accuracy", "f1_macro"}


def test_masked_language_model(bert, tmp_path):
    lines = [{"text": " ".join(WORDS)} for _ in range(60)]
    write(tmp_path / "text.jsonl", lines)
    config = TuneConfig(learning_rate=1e-2, epochs=5, batch_size=4)
    _, data, result = tune("masked-lm", bert, tmp_path / "text.jsonl", tmp_path, config)
    assert result.metrics["perplexity"] < len(WORDS)
    rows = [data.train[0], data.train[1]]
    one, two = data.collate(rows), data.collate(rows)
    assert torch.equal(one["input_ids"], two["input_ids"]) and (one["labels"] != -100).any()
    swapped = data.collate(rows[::-1])
    assert not torch.equal(one["labels"], swapped["labels"].flip(0)), "another batch has other masks"


def test_a_row_alone_in_its_batch_has_other_masks_in_every_pass(bert, tmp_path, monkeypatch):
    """Rows of 4,096 tokens are alone in theirs by default: three passes hid the same tokens three times."""
    chance, seen = np.random.default_rng(0), []
    write(tmp_path / "text.jsonl", [{"text": " ".join(chance.choice(WORDS, 7))} for _ in range(30)])
    data = data_for("masked-lm", bert, tmp_path / "text.jsonl")
    collate = type(data.type).collate

    def watched(kind, rows):
        batch = collate(kind, rows)
        if not rows[0]["fixed"]:
            seen.append((tuple(rows[0]["input_ids"]), tuple(batch["labels"].flatten().tolist())))
        return batch

    monkeypatch.setattr(type(data.type), "collate", watched)
    finetune(load_for_task(bert, data), data, TuneConfig(batch_size=1, epochs=3), folder=tmp_path / "work")
    rows = {ids for ids, _ in seen}
    assert len(seen) == 3 * len(rows) > 6 and len(set(seen)) > 2 * len(rows)


def test_causal_perplexity_counts_every_token_once(gpt2, tmp_path):
    chance = np.random.default_rng(0)
    text = "\n".join(" ".join(chance.choice(WORDS, 7)) for _ in range(60))
    for split in ("train", "validation"):
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / f"{split}.txt").write_text(text)
    found = {}
    for stride in (None, 5):
        data = data_for("causal-lm", gpt2, tmp_path / "set", DataOptions(max_length=16, stride=stride))
        model = load_for_task(gpt2, data).eval()
        found[stride] = measured(model, data, tmp_path)
        assert found[stride]["tokens"] == 60 * 7 - 1
        assert data.facts == {"context": 16, "stride": stride or 15, "words": 60 * 8}
    # By hand: one window after the other, everything in fp64.
    ids = load_processor(gpt2, "text")(text.replace("\n", " "), add_special_tokens=False)["input_ids"]
    total = 0.0
    for start, fresh in zip(*strided(len(ids), 16, 5), strict=True):
        window = torch.tensor([ids[start : start + 16]])
        logits = model(window).logits.detach().double().log_softmax(-1)[0]
        total -= sum(float(logits[i - 1, window[0, i]]) for i in range(fresh - start, window.shape[1]))
    assert found[5]["nll"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert found[5]["word_perplexity"] == pytest.approx(np.exp(total / 480), rel=1e-4)


@pytest.mark.parametrize(("count", "length", "stride"), [(10, 4, 3), (11, 4, 1), (3, 8, 7), (9, 8, 5), (2, 2, 1)])
def test_windows_predict_every_place_once(count, length, stride):
    starts, fresh = strided(count, length, stride)
    places = [place for s, f in zip(starts, fresh, strict=True) for place in range(f, min(s + length, count))]
    assert places == list(range(1, count))
    assert all(s < f for s, f in zip(starts, fresh, strict=True))


def test_images(vit, tmp_path):
    photos(tmp_path)
    options = DataOptions(augment=True)
    config = TuneConfig(learning_rate=1e-2, epochs=4, batch_size=8)
    model, data, result = tune("image-classification", vit, tmp_path / "photos", tmp_path, config, options)
    assert data.task.labels == ("blue", "red") and model.config.num_labels == 2
    assert result.metrics == {"accuracy": 1.0, "f1_macro": 1.0}
    with pytest.raises(ConfigError, match="group_by_length: got images, which have no length"):
        finetune(model, data, TuneConfig(group_by_length=True), folder=tmp_path / "grouped")
    once = TuneConfig(steps=1, batch_size=4)
    few = DataOptions(limit=8, validation_limit=6)
    chosen = task("image-classification")
    job = TuneJob(vit, chosen, str(tmp_path / "photos"), str(tmp_path / "out"), data=few, tune=once)
    finetune_checkpoint(job)
    named = replace(job, task=task("image-classification", columns=("img",)))
    assert "column" not in after_tuning(model, named, data).command, "convert finds the images itself"
    command = after_tuning(linearize.convert(model, "elu"), job, data).command
    assert command.startswith("linearize evaluate") and "--max-length" not in command
    found = evaluate_checkpoint(EvaluateJob(str(tmp_path / "out"), chosen, job.dataset, data=few))
    assert "6 of 24 rows" in found.data
    data = data_for("image-classification", vit, tmp_path / "photos", few)
    assert {int(data.collate([row])["labels"]) for row in data.train} == {0, 1}, "few images are of all classes"


def test_images_of_a_size_that_the_model_refuses_are_one_line(vit, tmp_path):
    from transformers import ViTImageProcessor

    photos(tmp_path)
    folder = shutil.copytree(vit, tmp_path / "vit")
    ViTImageProcessor(size={"height": 12, "width": 12}).save_pretrained(folder)
    with pytest.raises(DataError, match=r"pixel_values \[1, 3, 12, 12\]: Input image size \(12\*12\).*--image-size"):
        tune("image-classification", str(folder), tmp_path / "photos", tmp_path)


def test_a_model_without_a_loss_is_refused_in_one_line(tmp_path):
    """DeiT's distilled classifiers ignore labels: tuning one ended in a traceback."""
    from transformers import DeiTConfig, DeiTForImageClassificationWithTeacher, ViTImageProcessor

    photos(tmp_path)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = DeiTConfig(**sizes, image_size=32, patch_size=8)
    DeiTForImageClassificationWithTeacher(config).save_pretrained(tmp_path / "deit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "deit")
    with pytest.raises(ConfigError, match="DeiTForImageClassificationWithTeacher computes no loss on labels"):
        tune("image-classification", str(tmp_path / "deit"), tmp_path / "photos", tmp_path)


def test_tags(bert, tmp_path):
    chance = np.random.default_rng(0)
    rows = []
    for _ in range(60):
        words = [str(word) for word in chance.choice(WORDS, 6)]
        rows.append({"tokens": words, "ner_tags": ["B-X" if word in ("film", "song") else "O" for word in words]})
    write(tmp_path / "tags.jsonl", rows)
    config = TuneConfig(learning_rate=1e-2, epochs=6, batch_size=8)
    _, data, result = tune("token-classification", bert, tmp_path / "tags.jsonl", tmp_path, config)
    assert data.task.labels == ("B-X", "O")
    assert result.metrics["entity_f1"] > 0.9
    # Stage one joins the words.
    job = TuneJob(bert, task("token-classification"), str(tmp_path / "tags.jsonl"), "tagger")
    command = after_tuning(load_for_task(bert, data), job, data).command
    assert command == f"linearize convert tagger --dataset {tmp_path / 'tags.jsonl'} --text-column tokens"


def test_questions(bert, tmp_path):
    rows = []
    for number in range(24):
        context = " ".join([*WORDS[: number % 5], "song", *WORDS[5:9]])
        answer = {"text": ["song"], "answer_start": [context.index("song")]}
        rows.append({"id": str(number), "question": "is the", "context": context, "answers": answer})
    write(tmp_path / "squad.jsonl", rows)
    config = TuneConfig(learning_rate=1e-2, epochs=6, batch_size=8)
    _, data, result = tune("question-answering", bert, tmp_path / "squad.jsonl", tmp_path, config)
    assert set(result.metrics) == {"exact_match", "span_f1"} and result.metrics["span_f1"] > 0.5
    assert len(data.validation) >= 2


def asked(text, start):
    return {"question": "is the", "context": "song film", "answers": {"text": text, "answer_start": start}}


@pytest.mark.parametrize(("text", "start"), [("", 6), (" ", 4)])
def test_a_blank_answer_is_no_answer(bert, tmp_path, text, start):
    """Its place became a span (for a blank one that ended before it began), and "no answer" was not a choice."""
    write(tmp_path / "rows.jsonl", [asked([text], [start])] * 20)
    data = data_for("question-answering", bert, tmp_path / "rows.jsonl")
    assert all(row["start_positions"] == row["end_positions"] == 0 for row in (*data.train, *data.validation))
    surest = [np.eye(1, len(data.validation[0]["input_ids"])).repeat(len(data.validation), axis=0)] * 2
    assert data.type.compute_metrics(tuple(surest), None) == {"exact_match": 1.0, "span_f1": 1.0}


def test_blanks_around_an_answer_do_not_hide_it(bert, tmp_path):
    """A row whose answer was " song" or "song " was trained as a row without an answer."""
    context, rows = "the song was a play", []
    for text in ("song", " song", "song ", " song "):
        answer = {"text": [text], "answer_start": [context.index(text)]}
        rows.append({"id": "1", "question": "is the", "context": context, "answers": answer})
    write(tmp_path / "set" / "train.jsonl", rows)
    write(tmp_path / "set" / "validation.jsonl", rows)
    data = data_for("question-answering", bert, tmp_path / "set")
    # [CLS] is the [SEP] the song
    assert [(row["start_positions"], row["end_positions"]) for row in data.train] == [(5, 5)] * 4


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("masked-lm", True),
        pytest.param("cola", False, marks=pytest.mark.slow),
        pytest.param("cola", True, marks=pytest.mark.slow),
        pytest.param("masked-lm", False, marks=pytest.mark.slow),
    ],
)
def test_resume_ends_like_an_uninterrupted_run(bert, glue, tmp_path, name, group):
    changes = {"columns": ("sentence",)} if name == "masked-lm" else {}
    config = TuneConfig(
        learning_rate=2e-3, batch_size=8, epochs=2, eval_every=3, log_every=1, group_by_length=group, patience=9
    )
    path = glue / "cola"

    def run(folder, on_log=None, resume=False):
        data = data_for(name, bert, path, **changes)
        model = load_for_task(bert, data)
        return model, finetune(model, data, config, folder=folder, resume=resume, on_log=on_log)

    whole, expected = run(tmp_path / "whole")

    def stop(entry):
        if entry["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", stop)
    assert last_checkpoint(tmp_path / "cut").name == "checkpoint-3"
    # A checkpoint that was cut off while it was written is passed over.
    broken = tmp_path / "cut" / "checkpoint-4"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"")
    resumed, result = run(tmp_path / "cut", resume=True)
    assert result.metrics == pytest.approx(expected.metrics, abs=1e-6)
    assert result.steps == expected.steps and result.best_step == expected.best_step
    for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0)


def test_ctrl_c_keeps_the_step_that_it_comes_in(bert, glue, tmp_path):
    """Step 9 of 30 was lost to the first, as states came with evaluations alone: once per epoch."""
    config = TuneConfig(learning_rate=2e-3, batch_size=8, epochs=2)
    data = data_for("cola", bert, glue / "cola")

    def run(folder, on_step=None, resume=False, config=config):
        model = load_for_task(bert, data)
        return model, finetune(model, data, config, folder=folder, resume=resume, on_step=on_step)

    def stop(report):
        if report.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    whole, expected = run(tmp_path / "whole")
    assert expected.steps > 6
    # A process that was started in the background ignores it otherwise.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut", stop)
    finally:
        signal.signal(signal.SIGINT, before)
    assert last_checkpoint(tmp_path / "cut").name == "checkpoint-2"
    seen = []
    # How often states are kept is not a part of what a run does.
    resumed, result = run(tmp_path / "cut", seen.append, resume=True, config=replace(config, save_every=1))
    assert next(report.step for report in seen) == 3 and result.best_step == expected.best_step
    assert result.metrics == pytest.approx(expected.metrics, abs=1e-6)
    for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0)


@pytest.mark.parametrize("step", [7, 14])
def test_an_epoch_that_ctrl_c_ends_is_measured(bert, glue, tmp_path, step):
    """A run stopped in an epoch's last step was resumed behind the epoch's measurement, and kept the start instead."""
    config = TuneConfig(learning_rate=2e-2, batch_size=8, epochs=2)
    data = data_for("cola", bert, glue / "cola")

    def run(folder, on_step=None, resume=False):
        model = load_for_task(bert, data)
        return model, finetune(model, data, config, folder=folder, resume=resume, on_step=on_step)

    whole, expected = run(tmp_path / "whole")
    assert expected.best_step and expected.steps == 14
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut", lambda report: report.step == step and os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    resumed, result = run(tmp_path / "cut", resume=True)

    def measured_in(history):
        return [entry["eval_selection"] for entry in history if "eval_selection" in entry]

    assert result.best_step == expected.best_step
    assert measured_in(result.history)[:3] == measured_in(expected.history)[:3]
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


def test_groups_of_similar_length_are_the_same_after_a_resume(bert, glue, tmp_path):
    """In a later epoch than the first, the resumed run grouped the rows anew: it read some twice and some never."""
    config = TuneConfig(
        learning_rate=2e-3, batch_size=8, epochs=2, group_by_length=True, save_every=1, log_every=1, selection_rows=0
    )
    data = data_for("cola", bert, glue / "cola")

    def run(folder, on_step=None, resume=False):
        model = load_for_task(bert, data)
        finetune(model, data, config, folder=folder, resume=resume, on_step=on_step)

    def stop(report):
        if report.step == 11:
            raise KeyboardInterrupt

    losses, again = [], []
    run(tmp_path / "whole", lambda report: losses.append(report.loss))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", stop)
    run(tmp_path / "cut", lambda report: again.append(report.loss), resume=True)
    assert len(losses) == 16 and again == pytest.approx(losses[10:], abs=1e-6)


def test_states_come_as_often_as_is_asked(bert, glue, tmp_path):
    data = data_for("cola", bert, glue / "cola")

    def stop(report):
        if report.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        config = TuneConfig(batch_size=8, epochs=3, save_every=2)
        finetune(load_for_task(bert, data), data, config, folder=tmp_path / "run", on_step=stop)
    assert last_checkpoint(tmp_path / "run").name == "checkpoint-2"


@pytest.mark.parametrize("kernel", [pytest.param(None, marks=pytest.mark.slow), "hedgehog"])
def test_weights_that_are_saved_under_other_names_come_back(vit, tmp_path, kernel):
    """transformers saves ViT under older names than its modules have; a resume and the best step must find them."""
    folder = photos(tmp_path)

    def run(work, epochs, rate, resume=False, on_log=None):
        data = data_for("image-classification", vit, folder)
        model = load_for_task(vit, data, seed=3)
        model = model if kernel is None else linearize.convert(model, kernel)
        config = TuneConfig(
            learning_rate=rate, schedule="constant", batch_size=8, epochs=epochs, log_every=1, selection_rows=0
        )
        return model, finetune(model, data, config, folder=tmp_path / work, resume=resume, on_log=on_log)

    def stop(entry):
        if entry["step"] == 4:
            raise KeyboardInterrupt

    whole, expected = run("whole", 3, 1e-3)
    with pytest.raises(KeyboardInterrupt):
        run("cut", 3, 1e-3, on_log=stop)
    resumed, result = run("cut", 3, 1e-3, resume=True)
    assert result.steps == expected.steps
    for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0)

    # The second epoch is as good as any later one, so its weights are the ones to keep.
    model, result = run("best", 4, 1e-2)
    shorter, _ = run("shorter", 2, 1e-2)
    assert result.best_step == 6 < result.steps
    assert all(map(torch.equal, model.state_dict().values(), shorter.state_dict().values()))

    for weights in (tmp_path / "best").glob("checkpoint-*/model.safetensors"):
        state = load_file(weights)
        save_file({f"old.{name}": tensor for name, tensor in state.items()}, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="does not fit the model"):
        run("best", 4, 1e-2, resume=True)


@pytest.mark.parametrize("lost", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_resume_without_the_best_state_keeps_no_other(bert, glue, tmp_path, lost):
    """As after a kill while a finished run's checkpoints were removed; and in a folder that has been moved."""
    config = TuneConfig(learning_rate=1.0, schedule="constant", batch_size=8, steps=9, eval_every=3)

    def run(folder, resume=False):
        model = load_for_task(bert, data := data_for("stsb", bert, glue / "stsb"))
        return model, finetune(model, data, config, folder=folder, resume=resume)

    model, result = run(tmp_path / "run")
    best = result.best_step
    assert best < result.steps == 9
    (tmp_path / "run").rename(tmp_path / "moved")
    assert last_checkpoint(tmp_path / "moved").name == "checkpoint-9"
    if lost:
        shutil.rmtree(tmp_path / "moved" / f"checkpoint-{best}")
        assert last_checkpoint(tmp_path / "moved") is None
    again, resumed = run(tmp_path / "moved", resume=True)
    assert resumed.best_step == best
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))


def test_the_log_says_which_step_was_measured_last(bert, glue, tmp_path):
    """It said the last step, for which trackers and the log on screen then had two different scores."""
    config = TuneConfig(learning_rate=1.0, schedule="constant", batch_size=8, steps=9, eval_every=3)
    model, entries = load_for_task(bert, data := data_for("stsb", bert, glue / "stsb")), []
    result = finetune(model, data, config, folder=tmp_path / "run", on_log=entries.append)
    scores = [(entry["step"], entry["eval_score"]) for entry in entries if "eval_score" in entry]
    assert [step for step, _ in scores] == [3, 6, 9, result.best_step] and result.best_step == 0
    assert scores[-1][1] == result.score != scores[-2][1] and result.steps == result.history[-1]["step"] == 9


@pytest.mark.parametrize("moved", [False, True])
def test_a_resume_under_another_path_keeps_the_start(bert, glue, tmp_path, monkeypatch, moved):
    """transformers looks for the best state where it was written: it removed the start, or kept the last weights."""
    config = TuneConfig(learning_rate=1.0, schedule="constant", batch_size=8, steps=9, eval_every=3)

    def run(folder, on_step=None, resume=False):
        model = load_for_task(bert, data := data_for("stsb", bert, glue / "stsb"))
        return model, finetune(model, data, config, folder=folder, resume=resume, on_step=on_step)

    def stop(report):
        if report.step == 4:
            raise KeyboardInterrupt

    model, result = run(tmp_path / "whole")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run("cut", stop)
    again, resumed = run((tmp_path / "cut").rename(tmp_path / "moved") if moved else tmp_path / "cut", resume=True)
    assert resumed.best_step == result.best_step == 0 and resumed.steps == result.steps == 9
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))


def test_early_stopping_keeps_the_best(bert, glue, tmp_path):
    config = TuneConfig(learning_rate=1e-2, batch_size=16, epochs=30, patience=2, selection_rows=0)
    _, _, result = tune("cola", bert, glue, tmp_path, config)
    assert result.stopped == "early stopping" and result.steps < 30 * 4
    assert result.best_step == result.steps - 2 * 4
    scores = [entry["eval_score"] for entry in result.history if "eval_score" in entry]
    assert max(scores) == pytest.approx(result.score)
    assert result.selection["on"] == "validation rows" and result.selection["value"] == pytest.approx(result.score)


def test_a_loss_that_is_no_number_stops_the_run(bert, glue, tmp_path):
    data = data_for("cola", bert, glue)
    model = load_for_task(bert, data)
    with torch.no_grad():
        model.classifier.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="eval_selection is nan before the first step"):
        finetune(model, data, FAST, folder=tmp_path / "work")
    model = load_for_task(bert, data)

    def spoil(entry):
        if entry["step"] == 2:
            with torch.no_grad():
                model.classifier.weight.fill_(float("nan"))

    with pytest.raises(TrainingError, match=r"(loss|grad_norm) became nan by step [34]"):
        finetune(model, data, replace(FAST, log_every=1), folder=tmp_path / "other", on_log=spoil)


@pytest.mark.sampled("values")
@pytest.mark.parametrize("kernel", [None, "hedgehog"])
@pytest.mark.parametrize("base", ["bert", "gpt2"])
def test_lora_is_found_trained_and_merged(base, kernel, request, glue, tmp_path):
    import linearize

    folder = request.getfixturevalue(base)
    data = data_for("cola", folder, glue)
    model = load_for_task(folder, data)
    if kernel:
        model = linearize.convert(model, kernel)
    names = [name for name, _ in model.named_parameters()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = {"bert": {"query", "key", "value"}, "gpt2": {"c_attn", "c_proj"}}[base]
    assert {name.split(".")[-1] for name in target_modules(model)} == expected
    config = TuneConfig(learning_rate=1e-2, batch_size=16, epochs=1, **LAST, lora=LoraConfig(r=2, alpha=4))
    result = finetune(model, data, config, folder=tmp_path / "work")
    assert [name for name, _ in model.named_parameters()] == names
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert any(name.endswith(tuple(f"{e}.weight" for e in expected)) for name in moved)
    assert any("linear_attention" in name for name in moved) == bool(kernel)
    assert not any("embedding" in name or "wte" in name for name in moved)
    assert measured(model, data, tmp_path) == pytest.approx(result.metrics, abs=1e-6)


@pytest.mark.parametrize("kernel", [pytest.param(None, marks=pytest.mark.slow), "hedgehog"])
def test_a_kept_adapter_is_what_peft_reads(kernel, bert, glue, tmp_path):
    """On the model before tuning it gives what was saved, to the rounding of the merged weights."""
    import peft

    base = bert
    if kernel:
        model = linearize.convert(load_for_task(bert, data_for("cola", bert, glue)), kernel)
        base = str(linearize.save(model, tmp_path / "base", processor=load_processor(bert, "text")))
    config = TuneConfig(
        learning_rate=1e-2, batch_size=16, steps=3, **LAST, lora=LoraConfig(r=2, alpha=4, targets="query")
    )
    options = {"data": SHORT, "tune": config, "keep_adapter": True}
    job = TuneJob(base, task("cola"), str(glue), str(tmp_path / "out"), **options)
    target, _ = finetune_checkpoint(job)
    assert sorted(path.name for path in (target / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors"
    ]  # fmt: skip
    said = json.loads((target / "adapter" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == base.rpartition("/")[2] and said["peft_type"] == "LORA"
    data = data_for("cola", str(target), glue)
    batch = {name: value for name, value in data.collate(data.validation[:4]).items() if name != "labels"}
    merged, plain = load_for_task(str(target), data).eval(), load_for_task(base, data).eval()
    with torch.no_grad():
        before = plain(**batch).logits
        again = peft.PeftModel.from_pretrained(plain, str(target / "adapter")).eval()
        torch.testing.assert_close(again(**batch).logits, merged(**batch).logits, rtol=1e-5, atol=1e-6)
        assert (again(**batch).logits - before).abs().max() > 1e-3
    # It is no strange file to --overwrite, and goes with the checkpoint.
    finetune_checkpoint(replace(job, overwrite=True, keep_adapter=False, tune=replace(config, steps=1)))
    assert not (target / "adapter").exists()
    with pytest.raises(ConfigError, match="give --lora"):
        finetune_checkpoint(replace(job, overwrite=True, tune=replace(config, lora=None)))
    with pytest.raises(ConfigError, match="belongs to the unchanged model; choose another output"):
        finetune_checkpoint(replace(job, model=str(target), overwrite=True))


@pytest.mark.parametrize("name", ["vit", "clip"])
def test_low_rank_updates_of_image_models_train_their_head(name):
    """Their embedding has no single weight: a traceback; and of CLIP's image classifier all weights were trained."""
    model = original(name, "AutoModelForImageClassification")
    add_lora(model, LoraConfig(r=2))
    trained = {n for n, parameter in model.named_parameters() if parameter.requires_grad and "lora_" not in n}
    assert trained == {"classifier.weight", "classifier.bias"}


def test_a_single_step_trains(bert, glue, tmp_path):
    """The first rate of a warm-up is 0: one step, or one pass over few rows, changed no weight."""
    data = data_for("cola", bert, glue)
    model = load_for_task(bert, data)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    finetune(model, data, TuneConfig(learning_rate=1e-2, batch_size=64, epochs=1, **LAST), folder=tmp_path / "work")
    assert sum(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()) > 20


def test_an_infinite_gradient_in_fp16_is_a_step_left_out(bert, glue, tmp_path):
    """The first scale of the loss is often too large; such a step in the log ended the run."""
    data = data_for("cola", bert, glue)
    logs = {"loss": 0.7, "grad_norm": math.inf}
    tuner = Tuner(load_for_task(bert, data), data, TuneConfig(), tmp_path)
    for scale in (None, 0.5):
        tuner.accelerator.scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        with pytest.raises(TrainingError, match="grad_norm is inf before the first step"):
            tuner.log(logs)
    tuner.accelerator.scaler = torch.amp.GradScaler("cpu")
    tuner.log(logs)
    with pytest.raises(TrainingError, match="loss is nan"):
        tuner.log({**logs, "loss": math.nan})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"betas": (0.9, 1.0)}, r"betas: got \(0.9, 1.0\), expected two numbers from 0 to below 1"),
        ({"schedule": "polynomial", "learning_rate": 0.0}, "learning_rate: got 0.0, expected more than 1e-07"),
    ],
)
def test_values_that_the_optimizer_or_the_schedule_refuses(values, words):
    with pytest.raises(ConfigError, match=words):
        TuneConfig(**values)


def test_kernels_stay_as_they_are_beside_low_rank_updates(bert, glue, tmp_path):
    """`freeze_kernels` was passed over where there was `lora`."""
    data = data_for("cola", bert, glue)
    model = linearize.convert(load_for_task(bert, data), "hedgehog")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = TuneConfig(learning_rate=1e-2, batch_size=16, steps=2, **LAST, lora=LoraConfig(r=2), freeze_kernels=True)
    finetune(model, data, config, folder=tmp_path / "work")
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved and not any("linear_attention" in name for name in moved)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_states_of_several_processes_are_found_again(tmp_path, monkeypatch):
    """Each process writes the state of its random numbers; a resume took such a state for an incomplete one."""
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "model.safetensors"):
        (folder / name).write_bytes(b"")
    (folder / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": str(folder)}))
    assert last_checkpoint(tmp_path) is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert last_checkpoint(tmp_path) == folder
    (folder / "rng_state_1.pth").unlink()
    assert last_checkpoint(tmp_path) is None


def test_merging_changes_no_output(bert, glue):
    data = data_for("cola", bert, glue)
    model = load_for_task(bert, data).eval()
    batch = data.collate([data.train[0], data.train[1]])
    add_lora(model, LoraConfig(r=2))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    expected = model(**batch).logits
    torch.testing.assert_close(merge_lora(model)(**batch).logits, expected, atol=1e-5, rtol=1e-5)
    assert not any("lora" in name for name, _ in model.named_modules())


def test_parse_lora():
    assert parse_lora("r=4,alpha=8,dropout=0.1,targets=query+value") == LoraConfig(4, 8.0, 0.1, "query+value")
    with pytest.raises(ConfigError, match="lora: unknown option 'rank'"):
        parse_lora("rank=4")
    with pytest.raises(ConfigError, match=r"lora\.r: got 'x', expected a whole number"):
        parse_lora("r=x")


def test_converted_models_are_tuned_saved_and_loaded(bert, glue, tmp_path):
    import linearize

    data = data_for("cola", bert, glue)
    model = linearize.convert(load_for_task(bert, data), "hedgehog")
    log = log_file(STAGE_ONE, [{"step": 1, "losses": {"a": 2.0}}])
    linearize.save(model, tmp_path / "linear", processor=load_processor(bert, "text"), extra_files=log)
    job = TuneJob(str(tmp_path / "linear"), task("cola"), str(glue), str(tmp_path / "out"), data=SHORT, tune=FAST)
    target, result = finetune_checkpoint(job)
    found = evaluate_checkpoint(EvaluateJob(str(target), task("cola"), str(glue), data=SHORT))
    assert found.figures == pytest.approx(result.metrics, abs=1e-6)
    config = json.loads((target / "config.json").read_text())
    assert config["linearize"]["provenance"]["finetuning"]["task"] == "cola"
    first, *rest = read_log(target)
    assert first == {"stage": "distillation", "step": 1, "losses": {"a": 2.0}}
    assert {line["stage"] for line in rest} == {"finetuning"} and any("eval_score" in line for line in rest)
    # Tuned once more, the log has the last run of each stage, as the config has.
    job = TuneJob(str(target), task("cola"), str(glue), str(tmp_path / "again"), data=SHORT, tune=FAST)
    assert len(read_log(finetune_checkpoint(job)[0])) == 1 + len(rest)
    (target / LOG).write_text('{"stage": "finetuning"')
    with pytest.raises(CheckpointError, match=r"log\.jsonl"):
        finetune_checkpoint(TuneJob(str(target), task("cola"), str(glue), str(tmp_path / "bad"), data=SHORT))


@pytest.mark.parametrize("model_type", ["bert", "gpt2", "llama"])
def test_init_makes_a_linear_model(model_type, tokenizer, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"n_embd": 16, "n_layer": 2, "n_head": 2} if model_type == "gpt2" else {}
    config = {"model_type": model_type, "vocab_size": 20, "pad_token_id": 0, **sizes}
    head = "masked-lm" if model_type == "bert" else "causal-lm"
    plan = init_checkpoint(InitJob(config, str(tmp_path / "new"), task=head, kernel="hedgehog"), tokenizer)
    assert len(plan.converted) == 2
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    auto = AutoModelForMaskedLM if model_type == "bert" else AutoModelForCausalLM
    assert type(auto.from_pretrained(tmp_path / "new")).__qualname__.startswith("Linearized")


def test_init_takes_the_tokenizer_of_the_configs_folder(bert, tmp_path):
    """The result had none, and finetune failed on it with transformers' own message."""
    init_checkpoint(InitJob(bert, str(tmp_path / "new"), task="masked-lm"))
    texts = ["the cat sat", "on a mat"]
    new, old = (load_processor(folder, "text")(texts)["input_ids"] for folder in (str(tmp_path / "new"), bert))
    assert new == old
    # A file is a config alone.
    init_checkpoint(InitJob(f"{bert}/config.json", str(tmp_path / "bare"), task="masked-lm"))
    assert not (tmp_path / "bare" / "tokenizer.json").exists()


def test_init_refuses_labels_and_arguments_that_nothing_reads(bert, tmp_path):
    """They were ignored."""
    with pytest.raises(ConfigError, match="num_labels: got 3 for task causal-lm, whose head has no classes"):
        init_checkpoint(InitJob(bert, str(tmp_path / "new"), num_labels=3))
    with pytest.raises(ConfigError, match="kernel_arg: got arguments without a kernel"):
        init_checkpoint(InitJob(bert, str(tmp_path / "new"), layers="0-1=elu", kernel_args={"activation": "exp"}))
    init_checkpoint(InitJob(bert, str(tmp_path / "new"), task="text-classification", num_labels=3))
    assert len(json.loads((tmp_path / "new" / "config.json").read_text())["id2label"]) == 3


def test_a_head_with_other_labels_is_refused(bert, glue, tmp_path):
    job = TuneJob(bert, task("cola"), str(glue), str(tmp_path / "out"), data=SHORT, tune=FAST)
    target, _ = finetune_checkpoint(job)
    # The folder of all tasks' data is no data set for the next command.
    tuned = load_for_task(str(target), data_for("cola", bert, glue))
    command = after_tuning(tuned, job, data_for("cola", bert, glue))
    assert f"--dataset {glue}/cola --text-column sentence" in command.command
    with pytest.raises(
        ConfigError,
        match=r"has a trained head with 2 labels, but task stsb has 1; .* name all its labels .--labels A,B.,",
    ):
        load_for_task(str(target), data_for("stsb", bert, glue))
    assert load_for_task(str(target), data_for("stsb", bert, glue), new_head=True).config.num_labels == 1
    with pytest.raises(ConfigError, match="no trained head for task cola"):
        evaluate_checkpoint(EvaluateJob(bert, task("cola"), str(glue), data=SHORT))
    with pytest.raises(ConfigError, match="ForSequenceClassification, which has no trained head for task causal-lm"):
        # Its language head was drawn at random, and `evaluate` printed a perplexity of it.
        check_trained(str(target), task("causal-lm"))


@pytest.mark.parametrize(
    ("rows", "name", "changes", "message"),
    [
        ([{"text": "a", "label": "high"}] * 20, "text-regression", {}, "got 'high' in label column 'label'"),
        ([{"text": "a", "label": 0.5}] * 20, "text-classification", {}, "got the label 0.5"),
        ([{"sentence": "a", "label": 7}] * 20, "cola", {}, "got label 7, expected one of its 2 classes"),
        ([{"text": "a", "mark": 1}] * 20, "text-classification", {}, "got no column 'label'"),
        ([{"text": "a", "label": 1}], "text-classification", {}, "expected at least two"),
        ([{"words": ["a"], "ner_tags": ["O"]}] * 9, "token-classification", {}, "got no column 'tokens'"),
        ([{"tokens": ["a"], "ner_tags": [["O"]]}] * 9, "token-classification", {}, r"got tag \['O'\] in column"),
        ([{"tokens": ["a"], "ner_tags": [["O"]]}] * 9, "token-classification", {"labels": ("O",)}, r"got tag \['O'\]"),
        ([asked(["a"], [])] * 9, "question-answering", {}, r"got answers .*, expected text and answer_start"),
        ([asked(["a"], ["4"])] * 9, "question-answering", {}, r"got answers .*, expected text and answer_start"),
        ([asked("a film", 4)] * 9, "question-answering", {}, r"got answers .*, expected text and answer_start"),
    ],
)
def test_data_that_does_not_fit(bert, tmp_path, rows, name, changes, message):
    write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=message):
        data_for(name, bert, tmp_path / "rows.jsonl", **changes)


def test_rows_to_measure_on_without_tags(bert, tmp_path):
    folder = tmp_path / "tags"
    write(folder / "train.jsonl", [{"tokens": ["a", "film"], "ner_tags": ["O", "B-A"]}] * 9)
    write(folder / "validation.jsonl", [{"tokens": ["a", "film"]}] * 9)
    with pytest.raises(DataError, match="got no column 'ner_tags'"):
        data_for("token-classification", bert, folder)


def test_missing_data(bert, glue, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        data_for("cola", bert, tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no folder 'qnli' for task qnli"):
        data_for("qnli", bert, glue)
    with pytest.raises(DataError, match="has no data set; name one"):
        prepare(task("text-classification"), None)
    with pytest.raises(DataError, match="not in the cache"):
        prepare(task("rte"), load_processor(bert, "text"))


def test_an_interrupted_job_is_not_overwritten(bert, glue, tmp_path):
    (tmp_path / "out.training").mkdir()
    job = TuneJob(bert, task("cola"), str(glue), str(tmp_path / "out"), data=SHORT, tune=FAST)
    with pytest.raises(ConfigError, match="holds an interrupted run; continue with --resume"):
        finetune_checkpoint(job)
    with pytest.raises(ConfigError, match="takes at most 32 tokens"):
        finetune_checkpoint(
            TuneJob(bert, task("cola"), str(glue), str(tmp_path / "two"), data=DataOptions(max_length=64))
        )


def test_tasks():
    with pytest.raises(UnknownNameError, match="Did you mean 'mrpc'"):
        task("mrcp")
    with pytest.raises(LinearizeError, match="the score asks for 'bleu'"):
        task("cola", score=("bleu",)).mean_of({"matthews": 1.0})
    assert recovery(TASKS["cola"], 0.45, 0.5) == pytest.approx(90)
    assert recovery(TASKS["causal-lm"], 20.0, 18.0) == pytest.approx(90)
    assert recovery(TASKS["cola"], 0.45, 0.0) is None


@pytest.mark.parametrize("values", [{"batch_size": 0}, {"schedule": "sine"}, {"learning_rate": -1.0}, {"patience": -1}])
def test_wrong_options(values):
    with pytest.raises(ConfigError, match=f"stage two, {next(iter(values))}"):
        TuneConfig(**values)


def test_report_to(bert, glue, tmp_path, monkeypatch):
    """TensorBoard's files outlive the run's own folder; what cannot be reported to is refused first."""
    written = []

    class Writer:
        def __init__(self, folder):
            self.folder = folder

        def add_scalar(self, name, value, global_step):
            written.append((self.folder, name, global_step))

        def flush(self):
            pass

        close = flush

    job = TuneJob(bert, task("cola"), str(glue), str(tmp_path / "out"), data=SHORT, tune=FAST)
    for value, known, message in (
        ("tensorbord", True, "Did you mean 'tensorboard'"),
        ("tensorboard", False, r"pip install \"linearize\[trackers\]"),
    ):
        monkeypatch.setattr(accelerate.tracking, "_available_trackers", [LoggerType.TENSORBOARD] if known else [])
        with pytest.raises(ConfigError, match=message):
            finetune_checkpoint(replace(job, tune=replace(FAST, report_to=value)))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [LoggerType.TENSORBOARD])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    finetune_checkpoint(replace(job, tune=replace(FAST, report_to="tensorboard")))
    assert {Path(folder) for folder, _, _ in written} == {tmp_path / "out.tensorboard"}
    assert {"stage_two/loss", "stage_two/held_out", "stage_two/held_out/score"} <= {name for _, name, _ in written}
    # Each measurement once: the last step had a second score, that of the state that was kept.
    scored = [step for _, name, step in written if name == "stage_two/held_out/score"]
    assert scored == sorted(set(scored))
