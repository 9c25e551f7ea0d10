"""Rows with several labels each: how files give them, figures against scikit-learn, tuning and comparing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from sklearn.metrics import accuracy_score, f1_score
from support.tasks import write
from support.tiny import original
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, ViTImageProcessor, pipeline

import linearize
from linearize.cli.main import main
from linearize.core.errors import ConfigError, DataError
from linearize.jobs.evaluate import CHUNKS, ORIGINAL, OURS
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.intervals import measured
from linearize.training.stage_two.load import load_for_task
from linearize.training.stage_two.metrics import label_losses, multi_label
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.task_types.base import separator_of
from linearize.training.stage_two.tasks import several_labels, task
from linearize.training.stage_two.trainer import finetune

HEAD = ("joy", "anger", "Fear")
WANTED = [(0, 2), (), (1,), (0, 1, 2), (2,), (0,)]
NAMED = [[HEAD[number] for number in row] for row in WANTED]
FEW = [number % len(WANTED) for number in range(24)]
TEXTS = ["good film", "bad play was not", "the song"]


def table(labels, **types):
    data = Dataset.from_list([{"text": TEXTS[i % 3], "label": label} for i, label in enumerate(labels)])
    return data.cast(Features({"text": Value("string"), "label": types["label"]})) if types else data


def save(folder, tokenizer, *, converted=False, problem="multi_label_classification", labels=HEAD):
    model = original(
        "bert",
        "AutoModelForSequenceClassification",
        vocab_size=len(tokenizer),
        max_position_embeddings=32,
        problem_type=problem,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
    )
    model.config.architectures = [type(model).__name__]
    if converted:
        linearize.save(linearize.convert(model, kernel="hedgehog"), folder)
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def read(tokenizer, labels, head=None, names=(), **types):
    rows = labels if isinstance(labels, Dataset) else table(labels, **types)
    data = prepare(
        task("text-classification", labels=names), tokenizer, data={"train": rows, "validation": rows}, head_of=head
    )
    return data, [row["labels"] for row in data.train]


VECTORS = [[int(number in row) for number in range(3)] for row in WANTED]
FORMS = {
    "names": NAMED,
    "names in another case": [[name.upper() for name in row] for row in NAMED],
    "numbers": [list(row) for row in WANTED],
    "0 and 1": VECTORS,
    "0.0 and 1.0": [[float(value) for value in row] for row in VECTORS],
    "true and false": [[bool(value) for value in row] for row in VECTORS],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("known", ["head", "--labels", "data"])
def test_every_form_of_lists_gives_the_same_labels(tmp_path, tokenizer, form, known):
    """Lists were refused as the label of a text."""
    head = save(tmp_path, tokenizer) if known == "head" else None
    data, rows = read(tokenizer, FORMS[form], head, HEAD if known == "--labels" else ())
    if known == "data" and form.startswith("names"):
        assert sorted(data.task.labels) == list(data.task.labels) and len(data.task.labels) == 3
        order = [[name.casefold() for name in HEAD].index(name.casefold()) for name in data.task.labels]
        rows = [tuple(sorted(order[number] for number in row)) for row in rows]
    assert rows == WANTED and data.num_labels == 3
    batch = data.collate(list(data.train))["labels"]
    assert batch.dtype == torch.float32 and batch.shape == (6, 3)
    if known != "data":
        assert batch.tolist() == VECTORS


def test_classes_of_a_data_set_are_the_heads_by_name(tmp_path, tokenizer):
    names = ["fear", "joy", "anger"]
    labels = [[names.index(name.casefold()) for name in row] for row in NAMED]
    kinds = {"label": List(ClassLabel(names=names))}
    assert read(tokenizer, labels, save(tmp_path, tokenizer), **kinds)[1] == WANTED
    assert read(tokenizer, labels, **kinds)[0].task.labels == tuple(names)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([["joy"], ["hope"]], "got 'hope' in column 'label', expected lists of its 3 classes: joy, anger, Fear"),
        ([["joy"], ["joy", None]], "got None in column 'label', expected lists"),
        ([["joy"], ["joy", "JOY"]], r"got \['joy', 'JOY'\] in column 'label', expected each class once"),
        ([[0], [3]], "got 3 in column 'label', expected lists of its 3 classes"),
        ([[0], [-1]], "got -1 in column"),
        ([[0.5, 1.0, 0.0]], "got 0.5 in column"),
        ([[0, 1, 1, 0], [1, 0, 0, 0]], r"got \[0, 1, 1, 0\] in column 'label', expected each class once; or as many"),
        ([[True, False], [True, True]], "got True in column"),
        (["joy+anger", "Fear"], r"got 'joy\+anger' in column"),
        (["joy|anger", "anger;Fear"], "got 'anger;Fear' in column|got 'joy|anger' in column"),
    ],
)
def test_what_is_none_of_the_heads_labels_is_refused(tmp_path, tokenizer, labels, message):
    with pytest.raises(DataError, match=message):
        read(tokenizer, labels, save(tmp_path, tokenizer))


@pytest.mark.parametrize("labels", [[[0, 1], [1, 0]], [[1, 0]] * 3])
def test_zeros_and_ones_that_may_be_class_numbers_are_refused(tokenizer, labels):
    for names in ((), ("a", "b")):
        with pytest.raises(DataError, match="may be class numbers or a 0 or 1 for each class"):
            read(tokenizer, labels, names=names)
    assert read(tokenizer, [[*map(bool, row)] for row in labels])[1] == [tuple(np.flatnonzero(row)) for row in labels]
    assert read(tokenizer, [*labels, [1, 1]])[1] == [*(tuple(np.flatnonzero(row)) for row in labels), (0, 1)]


@pytest.mark.parametrize(
    ("texts", "names", "mark"),
    [
        (["a|b", "a"], "ab", "|"),
        (["a, b", "c"], "abc", ","),
        (["a;b", "b;a;c"], "abc", ";"),
        (["a", "b"], "ab", None),
        (["a|b", "a;b"], "ab", None),
        (["a|x"], "ab", None),
        (["a b"], "ab", None),
        (["a,b"], ["a", "b", "a;b"], None),
        (["a,b"], [], None),
    ],
)
def test_a_text_is_split_where_only_one_separator_can_be(texts, names, mark):
    assert separator_of(texts, list(names)) == mark


@pytest.mark.parametrize("known", ["head", "--labels"])
def test_one_text_for_several_labels_is_split_at_its_separator(tmp_path, tokenizer, known):
    rows = ["joy|Fear", "anger", "joy | anger|Fear", "Fear"]
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"good film,{row}\n" for row in rows))
    head = save(tmp_path / "head", tokenizer) if known == "head" else None
    chosen = task("text-classification", labels=() if head else HEAD)
    data = prepare(chosen, tokenizer, DataOptions(seed=1), data=str(tmp_path / "rows.csv"), head_of=head)
    assert data.type.several and data.task.labels == HEAD
    assert sorted(row["labels"] for row in [*data.train, *data.validation]) == [(0, 1, 2), (0, 2), (1,), (2,)]


def test_one_label_per_row_is_one_of_the_heads(tmp_path, tokenizer):
    """Such a head lost its loss: it was measured and tuned as if it chose one class."""
    head = save(tmp_path, tokenizer)
    for labels in (["joy", "fear", "anger"], [0, 2, 1]):
        data, rows = read(tokenizer, labels, head)
        assert rows == [(0,), (2,), (1,)] and data.num_labels == 3
        assert load_for_task(head, data).config.problem_type == "multi_label_classification"
    # Without the head, the data decides; the two do not fit.
    with pytest.raises(ConfigError, match=r"head that gives several labels per row, but rows .* have one"):
        load_for_task(head, read(tokenizer, ["joy", "anger", "fear"])[0])
    single = save(tmp_path / "single", tokenizer, problem="single_label_classification")
    data = read(tokenizer, NAMED, single)[0]
    with pytest.raises(ConfigError, match=r"head that gives one label per row, but rows .* have several"):
        load_for_task(single, data)
    assert load_for_task(single, data, new_head=True).config.problem_type == "multi_label_classification"


@pytest.mark.parametrize("name", ["text-regression", "sst2", "stsb", "similarity", "duplicates"])
def test_tasks_with_one_label_refuse_lists(tokenizer, name):
    rows = Dataset.from_list([{"sentence1": "good", "sentence2": "bad", "label": [0, 1]}] * 4)
    chosen = task(name, columns=("sentence1",) if name == "sst2" else ("sentence1", "sentence2"))
    with pytest.raises(DataError, match=f"task {name}: got lists in label column 'label', expected one label per row"):
        prepare(chosen, tokenizer, data={"train": rows, "validation": rows})


def test_figures_are_scikit_learns():
    draw = np.random.default_rng(0)
    for rows, classes in ((1, 1), (7, 3), (200, 6)):
        for share in (0.0, 0.2, 0.9):
            guess, true = draw.random((rows, classes)) < 0.3, draw.random((rows, classes)) < share
            found = multi_label(guess, true)
            expected = accuracy_score(true, guess) if classes > 1 else (guess == true).mean()
            assert found["subset_accuracy"] == pytest.approx(expected)
            micro = f1_score(true.ravel(), guess.ravel(), zero_division=0)
            each = [f1_score(t, g) for g, t in zip(guess.T, true.T, strict=True) if g.any() or t.any()]
            assert found["f1_micro"] == pytest.approx(micro)
            assert found["f1_macro"] == pytest.approx(np.mean(each) if each else 0.0)


def test_chance_is_the_best_of_all_constant_answers():
    kind = several_labels(task("text-classification", labels=("a", "b", "c", "d")))
    reader = kind.type(kind)
    for seed in range(6):
        true = (np.random.default_rng(seed).random((9, 4)) < [0.7, 0.4, 0.2, 0.0]).astype(np.float32)
        every = [np.broadcast_to([2.0 * (n >> bit & 1) - 1 for bit in range(4)], true.shape) for n in range(16)]
        found, best = reader.chance_metrics(true), [reader.compute_metrics(answer, true) for answer in every]
        for name in ("f1_micro", "f1_macro", "subset_accuracy"):
            assert max(one[name] for one in found) == pytest.approx(max(one[name] for one in best))


def test_a_probability_above_a_half_predicts_a_label(tokenizer):
    data, _ = read(tokenizer, FORMS["numbers"])
    logits = torch.tensor([0.49, 0.51]).logit().numpy()
    guess, _ = data.type.units(logits[None], np.zeros((1, 2)))
    assert guess.tolist() == [[False, True]]
    labels = data.collate(list(data.validation))["labels"].numpy()
    result = measured(data, data.type.compute_metrics(labels - 0.5, labels), labels - 0.5, labels)
    assert result.score == result.metrics["subset_accuracy"] == 1.0 and result.interval == (1.0, 1.0)
    assert result.chance < 1 and result.balanced is None


def test_losses_follow_their_formulas():
    kind = several_labels(task("text-classification", labels=HEAD))
    draw = torch.Generator().manual_seed(0)
    mine, theirs = torch.randn(5, 3, generator=draw, dtype=torch.float64), torch.randn(5, 3, generator=draw).double()
    labels = kind.type(kind).label_tensor([(0, 2), (), (1,), None, (0, 1, 2)])
    assert labels[3].isnan().all() and labels[0].tolist() == [1, 0, 1]
    out = type("Out", (), {})
    student, teacher = out(), out()
    student.logits, teacher.logits = mine, theirs
    known = [0, 1, 2, 4]
    p = mine[known].sigmoid()
    expected = -(labels[known] * p.log() + (1 - labels[known]) * (1 - p).log()).mean()
    loss = kind.type.label_loss(student, {"labels": labels})
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert kind.type.label_loss(student, {"labels": torch.full_like(labels, torch.nan)}) == 0
    p, q = mine.sigmoid(), theirs.sigmoid()
    divergence = (q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()).mean()
    found = kind.type.teacher_loss(student, teacher, {})
    torch.testing.assert_close(found.double(), divergence, rtol=1e-5, atol=1e-6)


def test_the_loss_that_chooses_is_that_at_the_best_temperature():
    draw = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(40, 3, generator=draw, dtype=torch.float64)
    labels = (torch.rand(40, 3, generator=draw) < logits.div(6).sigmoid()).double()
    found = label_losses(logits.numpy(), labels.numpy())

    def loss(factor):
        return functional.binary_cross_entropy_with_logits(logits * factor, labels)

    best = min(loss(factor) for factor in np.geomspace(1e-3, 10, 4001))
    assert found["excess"] == pytest.approx(float(loss(1.0) - best), abs=1e-6) and found["excess"] > 0.01
    assert found["error"] > 0


@pytest.mark.parametrize("how", ["full", "lora", "teacher", "new head"])
def test_tuning_lowers_the_loss_and_keeps_the_problem(tmp_path, tokenizer, capsys, how):
    """`finetune` refused lists; a run with them ended in a traceback."""
    labels = [["joy"] if "film" in TEXTS[i % 3] else ["anger", "Fear"] if "play" in TEXTS[i % 3] else [] for i in FEW]
    rows = [{"text": TEXTS[i % 3], "label": row} for i, row in zip(FEW, labels, strict=True)]
    for split in ("train", "validation"):
        write(tmp_path / "data" / f"{split}.jsonl", rows)
    softmax, model = save(tmp_path / "softmax", tokenizer), save(tmp_path / "linear", tokenizer, converted=True)
    if how == "new head":
        softmax = model = save(tmp_path / "other", tokenizer, problem=None, labels=("x", "y"))
    more = {
        "full": [],
        "lora": ["--lora", "r=2,alpha=4", "--learning-rate", "0.1"],
        "teacher": ["--teacher", softmax, "--labels-from", "0", "--labels-weight", "30"],
        "new head": ["--new-head", "--labels", ",".join(HEAD)],
    }[how]
    output, data = str(tmp_path / "tuned"), ["--task", "text-classification", "--dataset", str(tmp_path / "data")]
    common = ["--steps", "40", "--batch-size", "12", "--eval-every", "20", "--device", "cpu", "--output", output]
    common += ["--learning-rate", "0.02", "--dropout", "0", "--selection-rows", "0"]
    assert main(["finetune", model, *data, *common, *more]) == 0
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert list(config["id2label"].values()) == list(HEAD)
    capsys.readouterr()
    assert main(["evaluate", output, *data, "--device", "cpu", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures["figures"]) == {"f1_micro", "f1_macro", "subset_accuracy"}
    assert figures["score"] == figures["figures"]["f1_micro"] > 0.6 > figures["chance"]
    answers = pipeline("text-classification", output, top_k=None)(TEXTS)
    model = AutoModelForSequenceClassification.from_pretrained(output).eval()
    for text, answer in zip(TEXTS, answers, strict=True):
        expected = model(**tokenizer(text, return_tensors="pt")).logits[0].sigmoid().tolist()
        assert {one["label"]: one["score"] for one in answer} == pytest.approx(dict(zip(HEAD, expected, strict=True)))


def test_a_comparison_reads_chunks_and_pairs_the_rows(tmp_path, tokenizer, capsys):
    rows = [{"text": "good film " * (1 + i), "label": NAMED[i % 6]} for i in range(12)]
    write(tmp_path / "data" / "validation.jsonl", rows)
    softmax, model = save(tmp_path / "softmax", tokenizer), save(tmp_path / "linear", tokenizer, converted=True)
    line = ["evaluate", model, "--task", "text-classification", "--dataset", str(tmp_path / "data"), "--device", "cpu"]
    line += ["--compare", softmax, "--chunk-length", "8", "--max-length", "32"]
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [side["name"] for side in found["sides"]] == [OURS, ORIGINAL, CHUNKS]
    assert {side["minus"] for side in found["differences"]} == {ORIGINAL, CHUNKS}
    assert {side["by"] for side in found["differences"]} == {"f1_micro"}
    given = {"train": Dataset.from_list(rows), "validation": Dataset.from_list(rows)}
    data = prepare(task("text-classification"), tokenizer, DataOptions(max_length=32), data=given, head_of=softmax)
    logits = load_for_task(softmax, data).eval()(**data.collate(data.validation)).logits.detach().numpy()
    true = np.array([VECTORS[i % 6] for i in range(12)])
    assert found["sides"][1]["score"] == pytest.approx(f1_score(true, logits > 0, average="micro", zero_division=0))
    assert main(line) == 0
    # Headings of several words are broken between them.
    assert {"(f1", "micro)", "f1", "macro"} <= set(capsys.readouterr().out.replace("┃", " ").split())


@pytest.mark.parametrize("chunks", [False, True])
def test_chunks_give_the_mean_of_logits(tmp_path, tokenizer, chunks):
    head = save(tmp_path, tokenizer)
    rows = Dataset.from_list([{"text": "good film " * 9, "label": ["joy"]}, {"text": "bad", "label": []}])
    options = DataOptions(max_length=8, chunks=chunks, trains=False)
    given = {"train": rows, "validation": rows}
    data = prepare(task("text-classification"), tokenizer, options, data=given, head_of=head)
    model = load_for_task(head, data).eval()
    batch = data.collate(list(data.validation))
    assert batch["labels"].tolist() == [[1, 0, 0], [0, 0, 0]]
    found = data.type.wrap(model)(**batch)["logits"] if chunks else model(**batch).logits
    assert found.shape == (2, 3)
    if chunks:
        pieces = tokenizer(["good film good film good film"] * 3, return_tensors="pt")
        torch.testing.assert_close(found[0], model(**pieces).logits.mean(dim=0), rtol=1e-5, atol=1e-6)


def test_images_have_several_labels_too(tmp_path):
    from io import BytesIO

    from PIL import Image

    content = BytesIO()
    Image.new("RGB", (8, 8)).save(content, "png")
    raw = {"bytes": content.getvalue(), "path": None}
    rows = Dataset.from_list([{"image": raw, "label": row} for row in NAMED])
    processor = ViTImageProcessor(size={"height": 30, "width": 30})
    given = {"train": rows, "validation": rows}
    head = original(
        "vit",
        "AutoModelForImageClassification",
        problem_type="multi_label_classification",
        id2label=dict(enumerate(HEAD)),
    )
    head.config.architectures = [type(head).__name__]
    head.save_pretrained(tmp_path)
    data = prepare(task("image-classification"), processor, data=given, head_of=str(tmp_path))
    batch = data.collate([data.train[place] for place in range(6)])
    assert batch["labels"].tolist() == VECTORS
    model = load_for_task(str(tmp_path), data)
    torch.testing.assert_close(model(**batch).loss, data.type.label_loss(model(**batch), batch))
    found = finetune(model, data, TuneConfig(steps=2, batch_size=3, selection_rows=2), folder=tmp_path / "run")
    assert set(found.metrics) == {"f1_micro", "f1_macro", "subset_accuracy"}


def test_a_model_whose_loss_does_not_fit_the_rows_is_refused(tmp_path, tokenizer):
    """transformers takes 0 and 1 per class for the probabilities of one class, without a word."""
    several, single = read(tokenizer, NAMED)[0], read(tokenizer, ["a", "b", "c", "a", "b", "c"])[0]
    for data, problem in ((several, "single_label_classification"), (single, "multi_label_classification")):
        model = original(
            "bert", "AutoModelForSequenceClassification", vocab_size=len(tokenizer), num_labels=3, problem_type=problem
        )
        with pytest.raises(ConfigError, match=f"problem_type '{problem}' .*expected"):
            finetune(model, data, TuneConfig(steps=1), folder=tmp_path)
