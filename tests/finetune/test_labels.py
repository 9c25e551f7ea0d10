"""What an output of a classifier means: the names that the checkpoint has for it decide, and they survive tuning."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from support.tasks import no_rows as rows
from support.tiny import original
from transformers import AutoModelForSequenceClassification, ViTImageProcessor

import linearize
from linearize.core.errors import ConfigError, DataError
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.load import label_order, load_for_task, other_classes
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.tasks import task

IDS = torch.arange(1, 9)[None]


def save(folder, labels, *, converted=False):
    model = original(
        "bert",
        "AutoModelForSequenceClassification",
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
    )
    model.config.architectures = [type(model).__name__]
    if converted:
        linearize.save(linearize.convert(model), folder)
    else:
        model.save_pretrained(folder)
    return AutoModelForSequenceClassification.from_pretrained(folder).eval()(input_ids=IDS).logits


def logits(model):
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("converted", [False, True])
def test_outputs_in_another_order_are_put_into_the_tasks(tmp_path, converted):
    """A checkpoint whose first output is "acceptable" was measured as if that were "unacceptable"."""
    before = save(tmp_path, ["Acceptable", "unacceptable"], converted=converted)
    model = load_for_task(str(tmp_path), rows("cola"))
    torch.testing.assert_close(logits(model), before[:, [1, 0]], rtol=0, atol=1e-6)
    assert model.config.id2label == {0: "unacceptable", 1: "acceptable"}
    three = save(tmp_path / "three", ["contradiction", "neutral", "entailment"])
    model = load_for_task(str(tmp_path / "three"), rows("mnli"))
    torch.testing.assert_close(logits(model), three[:, [2, 1, 0]], rtol=0, atol=1e-6)


def test_names_stay_where_the_data_has_numbers_only(tmp_path):
    before = save(tmp_path, ["bad", "good"])
    model = load_for_task(str(tmp_path), rows("text-classification", labels=("0", "1")))
    assert model.config.id2label == {0: "bad", 1: "good"} and model.config.label2id == {"bad": 0, "good": 1}
    assert torch.equal(logits(model), before)


def test_numbers_as_texts_are_the_same_classes_as_numbers(tmp_path, tokenizer):
    """The texts "0" to "11" were sorted by the alphabet: measured on the numbers, a perfect model had 15 %."""
    texts, numbers = (
        Dataset.from_list([{"text": "good film", "label": kind(i % 12)} for i in range(24)]) for kind in (str, int)
    )
    data = prepare(task("text-classification"), tokenizer, data={"train": texts, "validation": numbers})
    assert data.task.labels == tuple(str(number) for number in range(12))
    assert [row["labels"] for row in data.train] == [row["labels"] for row in data.validation] == [*range(12)] * 2
    # A checkpoint of an earlier version has them in the alphabet's order.
    names = sorted(data.task.labels)
    before = save(tmp_path, names)
    model = load_for_task(str(tmp_path), data)
    torch.testing.assert_close(logits(model), before[:, [names.index(str(i)) for i in range(12)]], rtol=0, atol=1e-6)
    assert model.config.id2label == {number: str(number) for number in range(12)}


def test_outputs_stay_where_the_head_has_no_names_or_others(tmp_path):
    for number, labels in enumerate((["LABEL_0", "LABEL_1"], ["unacceptable", "acceptable"], ["no", "yes"])):
        before = save(tmp_path / str(number), labels)
        model = load_for_task(str(tmp_path / str(number)), rows("cola"))
        assert torch.equal(logits(model), before)
        assert model.config.id2label == {0: "unacceptable", 1: "acceptable"}
        note = other_classes(str(tmp_path / str(number)), rows("cola"))
        if labels[0] == "no":
            assert "matched by place: no for unacceptable, yes for acceptable" in note
        else:
            assert note is None
    note = other_classes(str(tmp_path / "2"), rows("text-classification", labels=("0", "1")))
    assert note == "The data has class numbers; they are matched by place with the head of '2': no for 0, yes for 1."
    save(tmp_path / "numbers", ["LABEL_0", "LABEL_1"])
    assert other_classes(str(tmp_path / "numbers"), rows("text-classification", labels=("0", "1"))) is None


HEAD = ["neutral", "Bad", "good", "awful"]


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("labels", [("good", "bad"), ("awful", "neutral", "bad"), ("bad", "good")])
def test_data_may_lack_classes_that_the_head_has_names_for(tmp_path, tokenizer, labels, converted):
    """It was refused until `--labels` listed all of them."""
    before = save(tmp_path, HEAD, converted=converted)
    table = Dataset.from_list([{"text": "good film", "label": labels[i % len(labels)]} for i in range(12)])
    data = prepare(task("text-classification", labels=labels), tokenizer, data={"train": table, "validation": table})
    model = load_for_task(str(tmp_path), data)
    absent = sorted({"neutral", "Bad", "good", "awful"} - {"Bad" if name == "bad" else name for name in labels})
    assert data.task.labels == (*labels, *absent) and data.num_labels == 4
    assert list(model.config.id2label.values()) == [*labels, *absent]
    order = [[name.casefold() for name in HEAD].index(name.casefold()) for name in data.task.labels]
    torch.testing.assert_close(logits(model), before[:, order], rtol=0, atol=1e-6)
    assert f"no row of {len(absent)} of the head's classes: {absent[0]!r}" in other_classes(str(tmp_path), data)
    guesses = torch.eye(4).repeat(3, 1).numpy()
    assert data.type.compute_metrics(guesses, [row["labels"] for row in data.validation])["accuracy"] <= 1
    # A second reading of the rows gets the same classes from the note.
    again = prepare(task("text-classification", labels=labels), tokenizer, data={"train": table, "validation": table})
    assert other_classes(str(tmp_path), again) and again.task.labels == data.task.labels


@pytest.mark.parametrize("labels", [("good", "better"), ("0", "1"), ("good", "bad", "fine")])
def test_classes_that_the_head_does_not_know_are_refused(tmp_path, labels):
    save(tmp_path, HEAD)
    with pytest.raises(ConfigError, match="has a trained head with 4 labels"):
        load_for_task(str(tmp_path), rows("text-classification", labels=labels))
    for names in (["LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3"], ["good", "Good", "bad", "Bad"]):
        save(tmp_path / names[0], names)
        with pytest.raises(ConfigError, match="has a trained head with 4 labels"):
            load_for_task(str(tmp_path / names[0]), rows("text-classification", labels=labels))


def test_a_new_head_is_named_as_the_task(tmp_path):
    save(tmp_path, ["acceptable", "unacceptable"])
    model = load_for_task(str(tmp_path), rows("cola"), new_head=True)
    assert model.config.id2label == {0: "unacceptable", 1: "acceptable"}


@pytest.mark.parametrize(
    ("own", "wanted", "order"),
    [
        (("b", "A"), ("a", "b"), [1, 0]),
        (("a", "b"), ("a", "b"), None),
        (("a", "b"), ("a", "c"), None),
        (("x", "y", "z"), ("z", "x", "y"), [2, 0, 1]),
        (("a", "b"), (), None),
    ],
)
def test_order(own, wanted, order):
    assert label_order(own, wanted) == order


def test_a_head_that_cannot_be_told_is_refused(tmp_path, monkeypatch):
    save(tmp_path, ["acceptable", "unacceptable"])
    made = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    made.classifier = torch.nn.Identity()
    loaded = (made, {"missing_keys": set(), "mismatched_keys": set()})
    monkeypatch.setattr("transformers.AutoModelForSequenceClassification.from_pretrained", lambda *_, **__: loaded)
    with pytest.raises(ConfigError, match="labels in another order than the task, and 0 layers"):
        load_for_task(str(tmp_path), rows("cola"))


def test_a_class_of_the_held_out_rows_alone_is_a_class(tokenizer):
    """Whether class 2 was known depended on the seed: "got label 2, expected one of its 2 classes"."""
    table = Dataset.from_list([{"text": "good film", "label": 2 if i == 5 else i % 2} for i in range(40)])
    for seed in range(12):
        data = prepare(task("text-classification"), tokenizer, DataOptions(seed=seed), data={"train": table})
        assert data.task.labels == ("0", "1", "2")
        if all(row["labels"] < 2 for row in data.train):
            break
    assert [row["labels"] for row in data.validation].count(2) == 1


@pytest.mark.parametrize("names", [("1", "2", "3"), ("-1", "0", "1")])
@pytest.mark.parametrize("kind", [str, int, float])
def test_numbers_are_the_classes_that_were_named(tokenizer, names, kind):
    """`--labels 1,2,3` for stars from 1 to 3: star 1 was class 2, and "got label 3, expected one of ... 1, 2, 3"."""
    stars = [names[i % 3] for i in range(40)]
    written = [star if kind is str else kind(star) for star in stars]
    table = Dataset.from_dict({"text": ["good film"] * 40, "label": written})
    given = {"train": table, "validation": table}
    data = prepare(task("text-classification", labels=names), tokenizer, data=given)
    assert data.task.labels == names
    assert [row["labels"] for row in data.validation] == [names.index(star) for star in stars]


@pytest.mark.parametrize("kind", [str, int])
def test_the_first_rows_of_a_sorted_table_have_one_class(tokenizer, kind):
    """With names as labels, `--limit` trained on one class alone."""
    table = Dataset.from_list([{"text": "good film", "label": kind(i // 20)} for i in range(40)])
    given = {"train": table, "validation": table}
    with pytest.raises(DataError, match=r"got only the class '?0'? in column 'label'"):
        prepare(task("text-classification"), tokenizer, DataOptions(limit=15), data=given)
    assert len(prepare(task("text-classification"), tokenizer, DataOptions(limit=21), data=given).train) == 21


def test_images_are_not_decoded_to_find_their_classes():
    """All were decoded at once: 400 photographs took 560 MB."""
    rows = [{"image": {"bytes": b"no image", "path": None}, "label": i % 3} for i in range(12)]
    processor = ViTImageProcessor(size={"height": 8, "width": 8})
    data = prepare(task("image-classification"), processor, data={"train": Dataset.from_list(rows)})
    assert data.task.labels == ("0", "1", "2")
    with pytest.raises(DataError, match="cannot decode image"):
        data.train[0]


@pytest.mark.parametrize("names", [("1", "2", "3"), ("-1", "0", "1")])
def test_tags_that_are_numbers_are_names_not_places(tokenizer, names):
    """The tag 1 of the names 1, 2 and 3 was trained as their second, 2, and the tag 3 was refused."""
    texts = ["good", "bad", "film"]
    tables = [
        Dataset.from_list([{"tokens": texts, "ner_tags": [kind(name) for name in names]}] * 2) for kind in (str, int)
    ]
    named = task("token-classification", labels=names)
    data = prepare(named, tokenizer, data=dict(zip(("train", "validation"), tables, strict=True)))
    expected = [-100, 0, 1, 2, -100]
    assert [row["labels"] for row in (*data.train, *data.validation)] == [expected] * 4


@pytest.mark.parametrize("places", [None, 1, [1, 4], [-1], ["1"]])
def test_recall_refuses_places_that_are_none_of_its_tokens(tokenizer, places):
    """Without a list of places every token was an answer; a place behind the row was an IndexError."""
    table = Dataset.from_list([{"text": "good bad good bad", "positions": places}] * 2)
    with pytest.raises(DataError, match=r"recall: got positions .* for 'good bad good bad' \(4 tokens\), expected"):
        prepare(task("recall"), tokenizer, data={"train": table, "validation": table})


def test_recall_reads_the_columns_that_the_user_names(tokenizer):
    table = Dataset.from_list([{"row": "good bad good bad", "answers": [1, 3]}] * 2)
    named = task("recall", columns=("row",), label="answers")
    data = prepare(named, tokenizer, data={"train": table, "validation": table})
    assert data.train[0]["labels"] == [-100, 6, -100, 6]


def test_a_new_head_instead_of_one_for_several_labels_learns_one_class_per_image(tmp_path):
    """Asked for a new head, it kept the loss of its config, which takes other labels: a traceback at the first step."""
    head = original("vit", "AutoModelForImageClassification", problem_type="multi_label_classification")
    head.config.architectures = [type(head).__name__]
    head.save_pretrained(tmp_path)
    model = load_for_task(str(tmp_path), rows("image-classification", labels=("red", "blue")), new_head=True)
    loss = model(pixel_values=torch.zeros(3, 3, 30, 30), labels=torch.tensor([0, 1, 1])).loss
    assert model.config.problem_type == "single_label_classification" and loss.isfinite()


def test_a_class_given_twice_is_refused():
    with pytest.raises(ConfigError, match="got the class 'yes' twice, expected different names"):
        task("text-classification", labels=("yes", "no", "yes"))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("causal-lm", {"text": "good film was"}),
        ("token-classification", {"tokens": ["good"], "ner_tags": ["O"]}),
        ("recall", {"text": "good bad", "positions": [1]}),
    ],
)
def test_a_split_without_rows_is_refused(tokenizer, name, row):
    """It was a traceback, or a task that is measured on nothing."""
    table = Dataset.from_list([row] * 2)
    tables = {"train": table, "validation": table.select([])}
    with pytest.raises(DataError, match="tables: got a split without rows, expected at least one"):
        prepare(task(name), tokenizer, DataOptions(max_length=4), data=tables)
