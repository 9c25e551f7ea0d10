"""Texts without a label, added to a task's rows: which are chosen, what is learned from them, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from support.tasks import WORDS, write

import linearize
from linearize.cli.main import main
from linearize.core.errors import ConfigError, DataError
from linearize.jobs.finetune import finetune_checkpoint
from linearize.jobs.task_config import TuneJob
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.load import load_for_task, load_processor
from linearize.training.stage_two.prepare import check_unlabelled, prepare
from linearize.training.stage_two.prepared import IGNORED, hold_out
from linearize.training.stage_two.save import describe
from linearize.training.stage_two.tasks import task
from linearize.training.stage_two.trainer import finetune
from linearize.training.stage_two.tuner import Tuner

SHORT = DataOptions(max_length=16)
# No two of these texts are the same, and none begins as those of the tasks do.
TEXTS = [f"the {one} {two} {three}" for one in WORDS[:4] for two in WORDS[:5] for three in WORDS[:5]]


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    """A folder of data sets: `songs` has a hundred texts, `doubles` some of them twice, or blank."""
    root = tmp_path_factory.mktemp("more")
    write(root / "songs" / "train.jsonl", [{"text": text, "label": 7} for text in TEXTS])
    write(root / "songs" / "validation.jsonl", [{"text": "never this one"}])
    write(root / "doubles.jsonl", [{"text": text} for text in (*TEXTS[:20], *TEXTS[:10], " ", f" {TEXTS[3]} ")])
    write(
        root / "pairs.jsonl",
        [{"premise": one, "hypothesis": two} for one, two in zip(TEXTS[:50], TEXTS[50:], strict=True)],
    )
    return root


def data_for(name, folder, path, texts, **options):
    chosen = task(name)
    rows = replace(SHORT, extra_texts=texts, **options)
    return prepare(chosen, load_processor(folder, chosen.modality), rows, data=str(path))


def read(tokenizer, rows):
    return [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows]


def rows_of(path, split="train"):
    return [json.loads(line) for line in (path / f"{split}.jsonl").read_text().splitlines()]


def test_as_many_as_are_asked_for_by_the_seed(bert, glue, more, tokenizer):
    found = {}
    for share in (0.25, 1, 50):
        data = data_for("cola", bert, glue, f"{more / 'songs'}={share}")
        found[share] = read(tokenizer, data.extra)
        assert set(found[share]) <= set(TEXTS), "the rows of the training split"
        assert all(row["labels"] == IGNORED and row["sources"] == () for row in data.extra)
    assert [len(texts) for texts in found.values()] == [16, 64, 100], "of 64 training rows; at most what there is"
    assert found[50][:64] == found[1] and found[1][:16] == found[0.25], "more of them keep those of fewer"
    assert data.description.endswith(", 100 texts without a label (all 100 of songs)")
    assert len(data.train) == 64 and len(data.validation) == 24
    other = data_for("cola", bert, glue, str(more / "songs"), seed=1)
    assert len(other.extra) == 64 and read(tokenizer, other.extra) != found[1]
    limited = data_for("cola", bert, glue, str(more / "songs"), limit=20)
    assert len(limited.extra) == 20, "as many as training rows that are left"


def test_several_data_sets_and_none_twice(bert, glue, more, tokenizer):
    data = data_for("cola", bert, glue, f"{more / 'doubles.jsonl'}=0.125,{more / 'songs'}=3")
    texts = read(tokenizer, data.extra)
    assert len(texts) == len(set(texts)) == 100 and set(texts[:8]) <= set(TEXTS[:20])
    assert data.description.endswith("100 texts without a label (8 of doubles.jsonl, all 92 of songs)")
    data = data_for("cola", bert, glue, f"{more / 'doubles.jsonl'}=9")
    assert sorted(read(tokenizer, data.extra)) == sorted(TEXTS[:20])
    assert data.options.extra_texts == ((str(more / "doubles.jsonl"), 9.0),)


def test_texts_of_the_tasks_own_rows_are_left_out(bert, glue, tmp_path, tokenizer):
    """Those of training rows bring nothing new; those of validation rows would be learned before they are measured."""
    own = [row["sentence"] for split in ("train", "validation") for row in rows_of(glue / "cola", split)]
    write(tmp_path / "mixed.jsonl", [{"sentence": f" {text}", "other": "x"} for text in (*own, *TEXTS[:30])])
    data = data_for("cola", bert, glue, f"{tmp_path / 'mixed.jsonl'}=9")
    assert sorted(read(tokenizer, data.extra)) == sorted(TEXTS[:30])
    held = hold_out(data)
    assert len(held.extra) == 30 and len(held.selection) == 12 and len(held.train) == 52
    mine = read(tokenizer, [held.selection[place] for place in range(12)] + list(data.validation))
    assert not set(mine) & set(TEXTS[:30])


def test_both_texts_of_a_pair_are_texts(bert, glue, more, tokenizer):
    data = data_for("cola", bert, glue, f"{more / 'pairs.jsonl'}=9")
    assert sorted(read(tokenizer, data.extra)) == sorted(TEXTS)


@pytest.mark.parametrize("name", ["mrpc", "stsb"])
def test_pairs_keep_away_from_held_out_rows(bert, glue, tmp_path, tokenizer, name):
    """No pair has a text of a validation row; one that shares a text with a held-out row goes when that is chosen."""
    train, measured = rows_of(glue / name), rows_of(glue / name, "validation")
    rows = [{"sentence1": row["sentence1"], "sentence2": TEXTS[place]} for place, row in enumerate(train)]
    rows += [{"sentence1": TEXTS[place], "sentence2": row["sentence1"]} for place, row in enumerate(measured)]
    rows += [{"sentence1": TEXTS[0], "sentence2": TEXTS[1]}]
    rows += [{key: row[key] for key in ("sentence1", "sentence2")} for row in train]
    write(tmp_path / "pairs.jsonl", rows)
    data = data_for(name, bert, glue, f"{tmp_path / 'pairs.jsonl'}=9", extra_pairs=0.5)
    anew, texts = data.extra[:32], data.extra[32:]
    known = {row[key] for row in measured for key in ("sentence1", "sentence2")}
    kept = [place for place, row in enumerate(train) if row["sentence1"] not in known]
    assert 0 < len(kept) <= 64 and len(texts) == len(kept) + 1
    assert f", 32 new pairs, {len(texts)} pairs without a label (all {len(texts)} of" in data.description
    shared = {places for row in texts if (places := row["sources"])}
    assert len(shared) == len({train[place]["sentence1"] for place in kept})
    held = hold_out(data)
    chosen = set(held.selection.places)
    left = [row for row in (*anew, *texts) if not chosen & set(row["sources"])]
    assert held.extra == left and len(left) < 32 + len(texts)
    assert all(math.isnan(row["labels"]) if name == "stsb" else row["labels"] == IGNORED for row in data.extra)


def pair_of(folder, data):
    """A teacher, and a converted student with other weights."""
    teacher = load_for_task(folder, data, seed=1)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return teacher, linearize.convert(load_for_task(folder, data, seed=2), "hedgehog")


def test_only_the_teachers_terms_count_for_them(bert, glue, more, tmp_path):
    data = hold_out(data_for("cola", bert, glue, str(more / "songs")))
    teacher, student = pair_of(bert, data)
    config = TuneConfig(labels_from=0.0, labels_ramp=0.0, labels_weight=3.0)
    trainer = Tuner(student, data, config, tmp_path / "work", teacher=teacher.eval())
    assert len(trainer.train_dataset) == 52 + 64 and trainer.label_weight() == 3.0
    for module in student.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    student.train()
    batch = data.collate(data.extra[:6])
    total = trainer.compute_loss(student, batch).item()
    parts = {name: float(part[0]) for name, part in trainer._parts.items()}
    assert parts["task"] == 0.0 and min(parts["hidden"], parts["logits"]) > 1e-5
    assert total == pytest.approx(parts["hidden"] + parts["logits"], rel=1e-6)
    trainer._parts = {}
    mixed = data.collate([*data.extra[:3], *(data.train[place] for place in range(3))])
    labelled = data.collate([data.train[place] for place in range(3)])
    trainer.compute_loss(student, mixed)
    trainer.compute_loss(student, labelled)
    both = [float(part) for part in trainer._parts["task"]]
    assert both[0] == pytest.approx(both[1], rel=1e-5), "the labels' loss is that of the rows that have one"
    alone = Tuner(student, data, config, tmp_path / "work")
    assert len(alone.train_dataset) == 52, "without a teacher they are not used"


def test_a_resumed_run_is_exact_and_reads_the_same_texts(bert, glue, more, tmp_path):
    config = TuneConfig(learning_rate=1e-3, batch_size=32, epochs=1, eval_every=2, log_every=1, labels_weight=0.0)

    def run(folder, texts, resume=False, on_log=None):
        data = data_for("cola", bert, glue, texts)
        teacher, student = pair_of(bert, data)
        return student, finetune(student, data, config, folder=folder, resume=resume, on_log=on_log, teacher=teacher)

    def stop(entry):
        if entry["step"] == 3:
            raise KeyboardInterrupt

    texts = f"{more / 'songs'}=0.75"
    whole, expected = run(tmp_path / "whole", texts)
    assert expected.steps == math.ceil((52 + 48) / 32)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", texts, on_log=stop)
    for other, message in ((f"{more / 'songs'}=0.5", r"data extra_texts=.*0.75.*0.5"), (None, "data extra_texts")):
        with pytest.raises(ConfigError, match=message):
            run(tmp_path / "cut", other, resume=True)
    resumed, result = run(tmp_path / "cut", texts, resume=True)
    assert result.selection == expected.selection and result.metrics == expected.metrics
    assert all(torch.equal(one, two) for one, two in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_runs_without_such_texts_are_described_as_before(bert, glue, more):
    data, extra = (data_for("cola", bert, glue, texts) for texts in (None, str(more / "songs")))
    model = load_for_task(bert, data)
    one, two = (describe(model, rows, TuneConfig()) for rows in (data, extra))
    assert "data extra_texts" not in one and two["data extra_texts"] == str(more / "songs")
    assert one["data contents"] != two["data contents"]


def test_names_are_looked_for_in_the_folder_of_data_sets(bert, glue, tokenizer, tmp_path, monkeypatch):
    data = data_for("cola", bert, glue, "stsb=0.5")
    assert data.options.extra_texts == (("stsb", 0.5),) and len(data.extra) == 32
    known = {text for row in rows_of(glue / "stsb") for text in (row["sentence1"], row["sentence2"])}
    assert set(read(tokenizer, data.extra)) <= known
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_text("\n".join(TEXTS[:9]))
    data = data_for("cola", bert, glue, "lines.txt")
    assert sorted(read(tokenizer, data.extra)) == sorted(TEXTS[:9])
    for name in ("lyrics", "./lyrics", "lyrics.jsonl"):
        with pytest.raises(DataError, match=rf"extra_texts: got '{name}', which does not exist in .*check the path"):
            data_for("cola", bert, glue, name)


def test_a_job_says_how_many(bert, glue, more, tmp_path, capsys):
    tune = TuneConfig(learning_rate=1e-3, batch_size=16, steps=1)
    job = TuneJob(bert, task("cola"), str(glue), str(tmp_path / "teacher"), data=SHORT, tune=tune)
    teacher, _ = finetune_checkpoint(job)
    assert main(["convert", bert, "--kernel", "hedgehog", "--distill-steps", "0", "--output", str(tmp_path / "s")]) == 0
    words = ["finetune", str(tmp_path / "s"), "--task", "cola", "--dataset", str(glue), "--max-length", "16"]
    words += ["--teacher", str(teacher), "--extra-texts", f"{more / 'songs'}=0.5", "--steps", "1", "--device", "cpu"]
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    assert "32 texts without a label (32 of songs)" in " ".join(capsys.readouterr().out.split())
    record = json.loads((tmp_path / "out" / "finetuning.json").read_text())
    assert "32 texts without a label (32 of songs)" in record["data"]


@pytest.mark.parametrize(
    ("name", "texts", "message"),
    [
        ("cola", "EMPTY", "'empty.txt' is empty"),
        ("cola", "BLANK", "all blank, expected texts"),
        ("cola", "VAGUE", r"got no clear column of text in .*call it 'sentence'; its columns are: one \(text\), two"),
        ("cola", "NUMBERS", r"got no clear column of text in .*its columns are: n \(number\)"),
        ("mrpc", "SONGS", r"got no pairs of texts in .*expected some for task mrpc"),
        ("cola", "OWN", "got no text in .*that is not among the task's rows already"),
        ("cola", "SONGS=0", "got weight '0' for data set"),
        ("cola", "", "got an empty extra_texts"),
        ("masked-lm", "SONGS", r"extra_texts: got .*task masked-lm reads no texts with a class or a number each"),
    ],
)  # fmt: skip
def test_what_is_refused(bert, glue, more, tmp_path, name, texts, message):
    (tmp_path / "empty.txt").write_text("")
    write(tmp_path / "blank.jsonl", [{"text": " "}])
    write(tmp_path / "vague.jsonl", [{"one": "good", "two": "film"}])
    write(tmp_path / "numbers.jsonl", [{"n": 3}])
    files = {word.upper(): str(tmp_path / f"{word}.jsonl") for word in ("blank", "vague", "numbers")}
    files |= {"EMPTY": str(tmp_path / "empty.txt"), "SONGS": str(more / "songs"), "OWN": str(glue / "cola")}
    for word, path in files.items():
        texts = texts.replace(word, path)
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        data_for(name, bert, glue, texts)
    assert "\n" not in str(caught.value)


def test_a_task_that_reads_images_is_refused():
    with pytest.raises(ConfigError, match=r"extra_texts: got 'a.txt', but task cifar10 reads no texts with a class"):
        check_unlabelled(task("cifar10"), replace(SHORT, extra_texts="a.txt"))


def test_a_job_without_a_teacher_is_refused(bert, glue, more, tmp_path, capsys):
    line = ["finetune", bert, "--task", "cola", "--dataset", str(glue), "--output", str(tmp_path / "out")]
    assert main([*line, "--extra-texts", str(more / "songs")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "extra_texts: got" in error and "no label; name a teacher (--teacher)" in error
    assert not (tmp_path / "out").exists()
