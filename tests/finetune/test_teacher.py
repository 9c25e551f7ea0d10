"""A teacher in stage two: its losses by hand, the kernels' rate, resume, every kind of task, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from support.tasks import WORDS, photos, word_tokenizer, write
from torch.nn import functional

import linearize
from linearize.checkpoint.loading import load_processor
from linearize.cli.main import main
from linearize.conversion.timm import wrap
from linearize.core.errors import CheckpointError, ConfigError
from linearize.jobs.finetune import finetune_checkpoint
from linearize.jobs.task_config import TuneJob
from linearize.training.alignment.objective import hidden_state_loss
from linearize.training.alignment.pair import check_teacher
from linearize.training.stage_two.config import DataOptions, LoraConfig, TuneConfig
from linearize.training.stage_two.load import check_processor, load_for_task, load_teacher
from linearize.training.stage_two.metrics import label_losses
from linearize.training.stage_two.prepare import hold_out, prepare
from linearize.training.stage_two.rows import IGNORED
from linearize.training.stage_two.tasks import TASKS, task
from linearize.training.stage_two.trainer import finetune
from linearize.training.stage_two.tuner import KERNEL_RATE, Tuner, layer_states

SHORT = DataOptions(max_length=16)
CONFIG = TuneConfig(learning_rate=1e-3, batch_size=8, epochs=2, eval_every=3, log_every=1)


def data_for(name, folder, path, options=SHORT, **changes):
    chosen = task(name, **changes)
    return prepare(chosen, load_processor(folder, chosen.modality), options, data=str(path))


def pair_of(folder, data, kernel="hedgehog"):
    """A teacher, and a converted student with other weights."""
    teacher = load_for_task(folder, data, seed=1)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    student = load_for_task(folder, data, seed=2)
    return teacher, student if kernel is None else linearize.convert(student, kernel)


def batch_of(data, count=6):
    return data.collate([data.train[place] for place in range(count)])


def trainer_for(student, data, teacher, tmp_path, config=CONFIG):
    data = hold_out(data, config.selection_rows, seed=config.seed)
    trainer = Tuner(student, data, config, tmp_path / "work", teacher=teacher.eval())
    trainer.state.max_steps = 10
    return trainer, data


def by_hand(student, teacher, batch, regression=False):
    """Hidden states and logits in plain fp64, token by token."""
    fields = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        mine, theirs = (model(**fields, output_hidden_states=True) for model in (student, teacher.eval()))
    keep = batch["attention_mask"].bool()
    terms = []
    for one, two in zip(mine.hidden_states[1:], theirs.hidden_states[1:], strict=True):
        x, y = one[keep].double(), two[keep].double()
        terms.append(float((x - y).pow(2).sum(1).mean() / (y - y.mean(0)).pow(2).sum(1).mean()))
    p, q = (out.logits.detach().double() for out in (theirs, mine))
    if regression:
        return sum(terms) / len(terms), float((p - q).pow(2).mean())
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return sum(terms) / len(terms), float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("name", ["mrpc", "stsb"])
def test_the_loss_is_its_parts(bert, glue, tmp_path, name):
    data = data_for(name, bert, glue)
    teacher, student = pair_of(bert, data)
    config = replace(CONFIG, teacher_hidden_weight=2.0, teacher_logits_weight=0.5, labels_weight=3.0)
    trainer, data = trainer_for(student, data, teacher, tmp_path, config)
    for module in student.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batch = batch_of(data)
    hidden, logits = by_hand(student.eval(), teacher, batch, name == "stsb")
    student.train()
    assert trainer.compute_loss(student, batch).item() == pytest.approx(2.0 * hidden + 0.5 * logits, rel=1e-4)
    trainer.state.global_step = 9
    own = student(**batch).loss
    expected = 2.0 * hidden + 0.5 * logits + 3.0 * own.item()
    assert trainer.compute_loss(student, batch).item() == pytest.approx(expected, rel=1e-4)
    # Half the batch without labels: the labels' part is the mean of the other half's.
    half = {**batch, "labels": batch["labels"].clone()}
    half["labels"][3:] = math.nan if name == "stsb" else IGNORED
    fields = {key: value for key, value in batch.items() if key != "labels"}
    found = student(**fields).logits[:3]
    known = batch["labels"][:3]
    want = functional.mse_loss(found[:, 0], known) if name == "stsb" else functional.cross_entropy(found, known)
    assert trainer.compute_loss(student, half).item() == pytest.approx(expected + 3.0 * (want - own).item(), rel=1e-4)
    half["labels"][:] = math.nan if name == "stsb" else IGNORED
    assert trainer.compute_loss(student, half).item() == pytest.approx(2.0 * hidden + 0.5 * logits, rel=1e-4)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_teacher_shares_what_low_rank_updates_do_not_train(bert, glue, tmp_path, monkeypatch):
    """The weights exist twice only where they are trained; the teacher stays what it was, the result what it is."""
    ends = []
    for shares in (True, False):
        data = data_for("mrpc", bert, glue)
        teacher, student = load_for_task(bert, data, seed=1), linearize.convert(load_for_task(bert, data, seed=1))
        before = {name: weight.clone() for name, weight in teacher.state_dict().items()}
        if not shares:
            monkeypatch.setattr("linearize.training.stage_two.trainer.share", lambda teacher, same: None)
        config = replace(CONFIG, epochs=1, lora=LoraConfig(r=2))
        finetune(student, data, config, folder=tmp_path / str(shares), teacher=teacher)
        mine, theirs = dict(student.named_parameters()), dict(teacher.named_parameters())
        shared = {name for name in theirs if theirs[name].data_ptr() == mine[name].data_ptr()}
        # The maps that have low-rank updates got new weights when these were merged.
        maps = {name for name in theirs if ".attention.self." in name and name.endswith("weight")}
        apart = maps | {"classifier.weight", "classifier.bias"}
        assert shared == (set(theirs) - apart if shares else set())
        assert any(not torch.equal(mine[name], theirs[name]) for name in apart)
        assert all(torch.equal(weight, before[name]) for name, weight in teacher.state_dict().items())
        ends.append(student.state_dict())
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())


def test_labels_join_later(bert, glue, tmp_path):
    data = data_for("cola", bert, glue)
    teacher, student = pair_of(bert, data)
    config = replace(CONFIG, labels_from=0.5, labels_ramp=0.2, labels_weight=2.0)
    trainer, _ = trainer_for(student, data, teacher, tmp_path, config)
    weights = []
    for step in range(10):
        trainer.state.global_step = step
        weights.append(trainer.label_weight())
    assert weights == pytest.approx([0.0] * 6 + [1.0] + [2.0] * 3)
    trainer.tune = replace(config, labels_from=0.0, labels_ramp=0.0)
    trainer.state.global_step = 0
    assert trainer.label_weight() == 2.0


@pytest.mark.sampled("values")
@pytest.mark.parametrize(
    ("given", "taught", "expected"), [(None, True, KERNEL_RATE), (None, False, 1e-3), (5e-4, False, 5e-4)]
)
@pytest.mark.parametrize("lora", [None, LoraConfig(r=2)])
def test_kernels_have_a_rate_of_their_own(bert, glue, tmp_path, given, taught, expected, lora):
    from linearize.training.adapters import add_lora

    data = data_for("cola", bert, glue)
    teacher, student = pair_of(bert, data, "hedgehog")
    if lora is not None:
        add_lora(student, lora)
    config = replace(CONFIG, kernel_learning_rate=given, weight_decay=0.1)
    trainer = Tuner(student, data, config, tmp_path / "work", teacher=teacher if taught else None)
    optimizer = trainer.create_optimizer()
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
    assert len(rates) == len(trained) and any(".linear_attention." in name for name in trained)
    for name, parameter in trained.items():
        assert rates[id(parameter)] == (expected if ".linear_attention." in name else 1e-3), name
    assert len({id(p) for group in optimizer.param_groups for p in group["params"]}) == len(trained)


@pytest.mark.sampled("one")
@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, alpha=4)])
def test_resume_with_a_teacher_is_exact(bert, glue, tmp_path, lora):
    config = replace(CONFIG, lora=lora, eval_every=7)

    def run(folder, resume=False, on_log=None):
        data = data_for("stsb", bert, glue, replace(SHORT, extra_pairs=0.5))
        teacher, student = pair_of(bert, data)
        before = {name: value.clone() for name, value in teacher.state_dict().items()}
        result = finetune(student, data, config, folder=folder, resume=resume, on_log=on_log, teacher=teacher)
        assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
        return student, result

    def stop(entry):
        if entry["step"] == 11:
            raise KeyboardInterrupt

    whole, expected = run(tmp_path / "whole")
    # 52 rows and what is left of 32 new pairs, in batches of 8.
    assert expected.steps > 2 * 7
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", on_log=stop)
    resumed, result = run(tmp_path / "cut", resume=True)
    assert result.selection == expected.selection and result.best_step == expected.best_step
    assert result.metrics == pytest.approx(expected.metrics, abs=1e-6)
    for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0)
    assert {"loss_hidden", "loss_logits"} <= {key for entry in result.history for key in entry}
    assert any("loss_task" in entry for entry in result.history)


@pytest.mark.parametrize("name", ["mrpc", "stsb"])
def test_what_is_kept_is_chosen_by_what_the_training_ends_with(bert, glue, tmp_path, name):
    data = data_for(name, bert, glue)
    teacher, student = pair_of(bert, data)
    found = {}
    for labels in ({}, {"labels_from": 1.0}, {"labels_weight": 0.0}):
        config = replace(CONFIG, teacher_logits_weight=0.5, labels_weight=3.0, eval_batch_size=64)
        trainer, held = trainer_for(student, data, teacher, tmp_path, replace(config, **labels))
        found[str(labels)] = trainer.measure_selection()["eval_selection"]
    batch = held.collate([held.selection[place] for place in range(len(held.selection))])
    _, logits = by_hand(student.eval(), teacher, batch, name == "stsb")
    with torch.no_grad():
        outputs = student(**batch)
    own = outputs.loss.item() - label_losses(outputs.logits.numpy(), batch["labels"].numpy())["excess"]
    together, *apart = found.values()
    assert together == pytest.approx(0.5 * logits + 3.0 * own, rel=1e-4)
    assert apart == pytest.approx([logits, logits], rel=1e-4)


def test_a_student_learns_from_its_teacher_without_labels(bert, glue, tmp_path):
    data = data_for("cola", bert, glue)
    teacher, student = load_for_task(bert, data), linearize.convert(load_for_task(bert, data), "hedgehog")
    config = TuneConfig(learning_rate=1e-2, batch_size=8, epochs=6, log_every=1, seed=1)
    assert finetune(teacher, data, config, folder=tmp_path / "teacher").score == 1.0
    config = replace(config, labels_weight=0.0)
    before = trainer_for(student, data, teacher, tmp_path, config)[0].measure_selection()["eval_selection"]
    result = finetune(student, data, config, folder=tmp_path / "work", teacher=teacher)
    values = [entry["eval_selection"] for entry in result.history if "eval_selection" in entry]
    assert result.score == 1.0 and not any("loss_task" in entry for entry in result.history)
    assert result.selection["value"] == pytest.approx(min(values)) and min(values) < 0.2 * before
    assert result.selection["by"] == "divergence from the teacher"
    errors = [entry["loss_hidden"] for entry in result.history if "loss_hidden" in entry]
    assert errors[-1] < 0.5 * errors[0]


def tagged(path):
    chance = np.random.default_rng(0)
    rows = [{"tokens": [str(w) for w in chance.choice(WORDS, 6)]} for _ in range(40)]
    write(path, [row | {"ner_tags": ["B-X" if word == "song" else "O" for word in row["tokens"]]} for row in rows])


def asked(path):
    rows = []
    for number in range(24):
        context = " ".join([*WORDS[: number % 5], "song", *WORDS[5:9]])
        answer = {"text": ["song"], "answer_start": [context.index("song")]}
        rows.append({"id": str(number), "question": "is the", "context": context, "answers": answer})
    write(path, rows)


def texts(path):
    write(path, [{"text": " ".join(WORDS)} for _ in range(60)])


@pytest.mark.parametrize(
    ("name", "base", "make"),
    [
        ("token-classification", "bert", tagged),
        ("question-answering", "bert", asked),
        ("masked-lm", "bert", texts),
        ("causal-lm", "gpt2", texts),
        ("image-classification", "vit", None),
    ],
)
def test_every_kind_of_task_has_a_teacher(name, base, make, request, tmp_path):
    folder = request.getfixturevalue(base)
    if make is None:
        path = photos(tmp_path)
    else:
        path = tmp_path / "rows.jsonl"
        make(path)
    data = data_for(name, folder, path)
    teacher, student = pair_of(folder, data)
    config = TuneConfig(learning_rate=1e-3, batch_size=4, steps=4, eval_every=2, log_every=1)
    result = finetune(student, data, config, folder=tmp_path / "work", teacher=teacher)
    last = [entry for entry in result.history if "loss_task" in entry]
    assert last and all(math.isfinite(entry["loss_task"]) and entry["loss_logits"] >= 0 for entry in last)
    # A student that is its teacher has nothing to learn.
    batch = data.collate([data.train[place] for place in range(3)])
    fields = {k: v for k, v in batch.items() if k not in ("labels", "start_positions", "end_positions")}
    with torch.no_grad():
        mine, theirs = student.eval()(**fields), teacher(**fields)
        assert float(data.type.teacher_loss(theirs, theirs, batch)) == pytest.approx(0.0, abs=1e-7)
        assert float(data.type.teacher_loss(mine, theirs, batch)) > 1e-9


def test_only_places_with_a_prediction_count():
    chance = torch.Generator().manual_seed(0)
    one, two = (torch.randn(2, 5, 7, generator=chance).double() for _ in range(2))
    labels = torch.tensor([[1, 2, IGNORED, 3, IGNORED], [IGNORED, 4, 5, IGNORED, IGNORED]])
    pack = type("Out", (), {})

    def out(logits):
        made = pack()
        made.logits = logits
        return made

    def kl(places):
        p, q = two.log_softmax(-1), one.log_softmax(-1)
        return float(torch.stack([(p[b, t].exp() * (p[b, t] - q[b, t])).sum() for b, t in places]).mean())

    found = TASKS["token-classification"].type.teacher_loss(out(one), out(two), {"labels": labels})
    assert float(found) == pytest.approx(kl([(0, 0), (0, 1), (0, 3), (1, 1), (1, 2)]), rel=1e-5)
    found = TASKS["causal-lm"].type.teacher_loss(out(one), out(two), {"labels": labels})
    assert float(found) == pytest.approx(kl([(0, 0), (0, 2), (1, 0), (1, 1)]), rel=1e-5)
    # Where an answer starts and ends, over real tokens alone.
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    sides = [pack(), pack()]
    for made, x in zip(sides, (one, two), strict=True):
        made.start_logits, made.end_logits = (x[..., i].masked_fill(mask == 0, 99.0 * (1 + i)) for i in range(2))
    terms = []
    for i in range(2):
        for row, count in ((0, 3), (1, 5)):
            p, q = (x[row, :count, i].log_softmax(-1) for x in (two, one))
            terms.append((p.exp() * (p - q)).sum())
    found = TASKS["question-answering"].type.teacher_loss(*sides, {"input_ids": mask, "attention_mask": mask})
    assert float(found) == pytest.approx(float(torch.stack(terms).mean()), rel=1e-5)
    assert float(TASKS["sst2"].type.label_loss(out(torch.randn(3, 2)), {"labels": torch.full((3,), IGNORED)})) == 0.0


def test_a_job_with_a_teacher(bert, glue, tmp_path):
    tune = TuneConfig(learning_rate=1e-3, batch_size=16, epochs=1)
    teacher, _ = finetune_checkpoint(
        TuneJob(bert, task("mrpc"), str(glue), str(tmp_path / "teacher"), data=SHORT, tune=tune)
    )
    assert main(["convert", bert, "--kernel", "hedgehog", "--distill-steps", "0", "--output", str(tmp_path / "s")]) == 0
    words = ["finetune", str(tmp_path / "s"), "--task", "mrpc", "--dataset", str(glue), "--max-length", "16"]
    words += ["--teacher", str(teacher), "--extra-pairs", "1", "--epochs", "1", "--output", str(tmp_path / "out")]
    assert main([*words, "--device", "cpu", "--kernel-learning-rate", "1e-4"]) == 0
    record = json.loads((tmp_path / "out" / "finetuning.json").read_text())
    assert record["teacher"] == "teacher" and record["options"]["kernel_learning_rate"] == 1e-4
    assert record["selection"]["by"] == "divergence from the teacher and loss at the best temperature on the labels"
    assert record["selection"]["rows"] == 12
    assert "64 new pairs" in record["data"]


@pytest.fixture
def tuned(bert, glue, tmp_path):
    """Folder of a teacher for mrpc."""
    tune = TuneConfig(learning_rate=1e-3, batch_size=16, steps=1)
    job = TuneJob(bert, task("mrpc"), str(glue), str(tmp_path / "teacher"), data=SHORT, tune=tune)
    return finetune_checkpoint(job)[0]


def refused(name, data, folder):
    student = linearize.convert(load_for_task(folder, data), "hedgehog")
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        load_teacher(str(name), data, student)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_teachers_that_are_refused(bert, gpt2, glue, tmp_path, tuned):
    from transformers import BertConfig, BertForSequenceClassification, GPT2ForSequenceClassification

    data = data_for("mrpc", bert, glue)
    student = linearize.convert(load_for_task(bert, data), "hedgehog")
    assert not any(p.requires_grad for p in load_teacher(str(tuned), data, student).parameters())

    assert "no trained head for task mrpc; tune it first" in refused(bert, data, bert)
    assert "does not exist" in refused(tmp_path / "nowhere", data, bert)
    assert "takes at most 32 tokens, but rows have up to 64" in refused(
        tuned, data_for("mrpc", bert, glue, replace(SHORT, max_length=64)), bert
    )
    assert "tuned for task mrpc, expected one tuned for cola" in refused(tuned, data_for("cola", bert, glue), bert)
    assert "expected one tuned for stsb" in refused(tuned, data_for("stsb", bert, glue), bert)

    student.save_pretrained(tmp_path / "converted")
    word_tokenizer().save_pretrained(tmp_path / "converted")
    assert "got a converted model, expected a softmax one" in refused(tmp_path / "converted", data, bert)

    def other(folder, model, tokenizer=None):
        model.save_pretrained(tmp_path / folder)
        (tokenizer or word_tokenizer()).save_pretrained(tmp_path / folder)
        return tmp_path / folder

    sizes = {"vocab_size": 17, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32}
    sizes |= {"pad_token_id": 0}
    names = {"id2label": {0: "not_equivalent", 1: "equivalent"}, "label2id": {"not_equivalent": 0, "equivalent": 1}}
    wide = BertConfig(hidden_size=32, num_hidden_layers=2, **sizes, **names)
    assert "a model of another size" in refused(other("wide", BertForSequenceClassification(wide)), data, bert)
    deep = BertConfig(hidden_size=16, num_hidden_layers=3, **sizes, **names)
    assert "the student has none" in refused(other("deep", BertForSequenceClassification(deep)), data, bert)
    turned = {"id2label": {0: "equivalent", 1: "not_equivalent"}, "label2id": {"equivalent": 0, "not_equivalent": 1}}
    labels = BertConfig(hidden_size=16, num_hidden_layers=2, **sizes, **turned)
    folder = other("turned", BertForSequenceClassification(labels).eval())
    taught = load_teacher(str(folder), data, linearize.convert(load_for_task(bert, data)))
    ids = torch.tensor([[2, 5, 6, 3]])
    # Its outputs are put into the order of the task.
    turned_logits = BertForSequenceClassification.from_pretrained(folder)(ids).logits
    torch.testing.assert_close(taught(ids).logits, turned_logits.flip(-1))
    three = BertConfig(hidden_size=16, num_hidden_layers=2, **sizes, num_labels=3)
    assert "has a trained head with 3 labels, but task mrpc has 2" in refused(
        other("three", BertForSequenceClassification(three)), data, bert
    )
    kind = load_for_task(gpt2, data)
    assert isinstance(kind, GPT2ForSequenceClassification)
    assert "a model of type 'gpt2', expected 'bert'" in refused(other("kind", kind), data, bert)

    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["another"])
    fine = BertConfig(hidden_size=16, num_hidden_layers=2, **sizes, **names)
    assert "another tokenizer" in refused(other("tokens", BertForSequenceClassification(fine), tokenizer), data, bert)
    (tuned / "finetuning.json").write_text("{")
    assert "tune the teacher again" in refused(tuned, data, bert)


def test_a_longer_student_may_have_its_teacher(bert, glue, tmp_path):
    """A student whose positions were extended has one larger table; anything else that differs is refused."""
    from linearize.conversion.positions import extend_positions

    data = data_for("mrpc", bert, glue)
    teacher, student = pair_of(bert, data, None)
    extend_positions(student, 64)
    check_teacher(linearize.convert(student, "hedgehog"), teacher)
    with pytest.raises(ConfigError, match="expected a converted model; convert it first"):
        check_teacher(load_for_task(bert, data), teacher)
    with pytest.raises(ConfigError, match="got a converted model"):
        check_teacher(student, linearize.convert(load_for_task(bert, data), "elu"))


def test_image_processors_are_compared(vit):
    from transformers import ViTImageProcessor

    own = load_processor(vit, "image")
    check_processor("t", own, own)
    with pytest.raises(ConfigError, match="got size"):
        check_processor("t", ViTImageProcessor(size={"height": 16, "width": 16}), own)


@pytest.mark.parametrize(
    "words",
    [
        ["--extra-pairs", "1"],
        ["--teacher-hidden-weight", "0", "--teacher-logits-weight", "0"],
        ["--temperature", "0"],
        ["--labels-from", "2"],
        ["--selection-rows", "-1"],
        ["--selection-rows", "64"],
        ["--kernel-learning-rate", "-1"],
        ["--teacher", "BERT"],
    ],
)
def test_bad_options_are_one_line(bert, glue, tmp_path, words, capsys):
    words = [bert if word == "BERT" else word for word in words]
    line = ["finetune", bert, "--task", "mrpc", "--dataset", str(glue), "--max-length", "16", "--device", "cpu"]
    assert main([*line, "--output", str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error and not (tmp_path / "out").exists()


def test_extra_pairs_need_pairs(bert, glue):
    for name in ("cola", "masked-lm"):
        with pytest.raises(ConfigError, match=r"extra_pairs: got 1.0, but task .* reads no pairs"):
            data_for(name, bert, glue / "cola", replace(SHORT, extra_pairs=1.0))


def test_a_teacher_measured_on_other_rows_has_no_result_beside_the_students(tmp_path):
    """The card and the report show both scores side by side."""
    from linearize.training.stage_two.load import RECORD
    from linearize.training.stage_two.save import original_result

    record = {"task": "sst2", "score": 0.9, "metrics": {"accuracy": 0.9}, "max_length": 8, "scored": "these"}
    (tmp_path / RECORD).write_text(json.dumps(record))
    assert original_result(tmp_path, "sst2", "these")["score"] == 0.9
    assert original_result(tmp_path, "sst2", "others") is None and original_result(tmp_path, "cola", "these") is None
    (tmp_path / RECORD).write_text(json.dumps({name: record[name] for name in record if name != "scored"}))
    assert original_result(tmp_path, "sst2", "others")["score"] == 0.9


def image_model(kind):
    """A classifier of images, and its layers or stages."""
    if kind == "timm":
        timm = pytest.importorskip("timm")
        sizes = {"img_size": 32, "depth": 3, "embed_dim": 32, "num_heads": 4}
        model = wrap(timm.create_model("vit_tiny_patch16_224", **sizes), model_args=sizes)
        return model, list(model.timm_model.blocks)
    if kind == "segformer":
        config = transformers.SegformerConfig(
            hidden_sizes=[8, 8, 16, 24], depths=[1] * 4, num_attention_heads=[1, 1, 2, 2], num_labels=5
        )
        model = transformers.SegformerForImageClassification(config)
        return model, [module for module in model.modules() if type(module).__name__ == "SegformerStage"]
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=16
    )
    model = transformers.ViTForImageClassification(config)
    return model, list(model.vit.layers)


@pytest.mark.parametrize("kind", ["vit", "timm", "segformer"])
def test_the_error_of_hidden_states_counts_every_layer_of_an_image_model(kind):
    """Those of timm and SegFormer are images with the channels first, without the embeddings."""
    torch.manual_seed(0)
    pixels, sides, losses = torch.randn(4, 3, 32, 32), [], []
    for _ in range(2):
        model, layers = image_model(kind)
        outputs = []
        for layer in layers:
            layer.register_forward_hook(lambda module, args, output, outputs=outputs: outputs.append(output))
        with torch.no_grad():
            found = layer_states(model.eval()(pixel_values=pixels, output_hidden_states=True))
        sides.append((found, outputs))
    (mine, first), (theirs, second) = sides
    assert len(mine) == len(first) == len(layers)
    for x, y in zip(first, second, strict=True):
        if kind == "timm":
            # Without the class token, as timm returns them.
            x, y = x[:, 1:], y[:, 1:]
        elif kind == "segformer":
            x, y = x.flatten(2).mT, y.flatten(2).mT
        x, y = (side.flatten(0, 1).double() for side in (x, y))
        losses.append(float((x - y).square().sum() / (y - y.mean(dim=0)).square().sum()))
    assert float(hidden_state_loss(mine, theirs, None)) == pytest.approx(sum(losses) / len(losses), rel=1e-4)
