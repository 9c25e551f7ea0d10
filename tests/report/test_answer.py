"""A report answers: its first sentence, its inputs, and the texts whose prediction changed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from support.checkpoints import WORDS, tokenizer
from support.tiny import converted, original

import linearize
from linearize.checkpoint.loading import load_converted, load_model
from linearize.checkpoint.provenance import Provenance
from linearize.core.options import recorded
from linearize.evaluation.bench.meter import Timing
from linearize.evaluation.bench.rows import Row, Variant
from linearize.evaluation.report.gather import answer, gather
from linearize.evaluation.report.inputs import load_inputs
from linearize.evaluation.report.options import InputOptions, ReportOptions
from linearize.evaluation.report.page import write_report
from linearize.evaluation.report.predictions import NUMBER, SEVERAL, compare_predictions, why_not
from linearize.jobs.config import ConvertJob

read = Provenance
NAMES = {0: "<b>bad", 1: "<b>so", 2: "<b>good"}


def rows(count):
    return [
        {"text": " ".join([*WORDS[i % 7 :], *WORDS[: i % 5], *WORDS[: i % 3]]), "other": f"the {i}", "label": i % 3}
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A classifier of three names, its original, and next to them the data that its record names."""
    root = tmp_path_factory.mktemp("answer")
    head = "AutoModelForSequenceClassification"
    config = {
        "num_labels": 3,
        "id2label": NAMES,
        "label2id": {n: i for i, n in NAMES.items()},
        "initializer_range": 0.3,
    }
    plain = original("bert", head, **config)
    plain.save_pretrained(root / "original")
    turned = original("bert", head, **config | {"id2label": {0: NAMES[2], 1: NAMES[0], 2: NAMES[1]}})
    turned.load_state_dict(plain.state_dict())
    with torch.no_grad():
        for tensor in (turned.classifier.weight, turned.classifier.bias):
            tensor.copy_(tensor[[2, 0, 1]])
    turned.save_pretrained(root / "turned")
    original("bert", "AutoModelForMaskedLM").save_pretrained(root / "untuned")
    for name in ("original", "turned", "untuned"):
        tokenizer().save_pretrained(root / name)
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(150)))
    job = ConvertJob.of(model=str(root / "original"), dataset=str(root / "rows.jsonl"), text_column="text")
    provenance = {"base_model": "nobody/nothing", "options": recorded(job), "seed": 0, "longest_row": 31}
    linearize.save(
        converted("bert", head, config=config), root / "linear", processor=tokenizer(), provenance=provenance
    )
    return root


def given_by(made):
    return {"dataset": str(made / "rows.jsonl"), "text_column": "text"}


def made_by(loaded):
    return read(loaded.model.config.linearize["provenance"])


def options(made, original="original", **inputs):
    given = InputOptions(**given_by(made) | {"inputs": 3} | inputs)
    return ReportOptions(str(made / "linear"), original and str(made / original), given, lengths=(), device="cpu")


def test_the_page_opens_with_the_answer_and_lists_the_texts(made, tmp_path):
    found = write_report(options(made), str(tmp_path / "out"))
    numbers, page = (json.loads((tmp_path / "out/report.json").read_text()), (tmp_path / "out/index.html").read_text())
    assert found.inputs == "3 held-out examples of file rows.jsonl"
    changes = found.changes
    cosine = found.outputs.cosine
    assert numbers["answer"] == (
        f"It gives {changes.same} of 37 texts the same label as the original and its outputs have a mean cosine of "
        f"{cosine:.3f} to the original's; how fast it is was not measured here; it takes up to 64 tokens, and it was "
        "taught on rows of up to 31."
    )
    assert page.index("It gives") < page.index("<nav") and '<section id="predictions">' in page
    assert "<b>" not in page and page.count("<td>&lt;b&gt;") == 2 * len(changes.largest)
    assert all(change.text in page for change in changes.largest)
    assert numbers["predictions"]["largest"][0]["difference"] == pytest.approx(changes.largest[0].difference)


def test_changed_predictions_are_the_models_own(made):
    """Written out: each text alone through transformers' own model; labels by name, in whatever order they stand."""
    linear, plain = load_converted(str(made / "linear")), load_model(str(made / "original"))
    texts = load_inputs(linear, InputOptions(**given_by(made)), made_by(linear)).texts
    assert len(texts) == 37
    found = compare_predictions(plain, linear, texts, 31)
    expected = []
    with torch.no_grad():
        for example in texts:
            one = tokenizer()(example.value, return_tensors="pt", truncation=True, max_length=31)
            one = {name: value for name, value in one.items() if name != "token_type_ids"}
            sides = [model.model(**one).logits.softmax(-1)[0] for model in (plain, linear)]
            apart = 0.5 * float((sides[0] - sides[1]).abs().sum())
            expected.append((example.value, [NAMES[int(side.argmax())] for side in sides], apart))
    assert found.same == sum(labels[0] == labels[1] for _, labels, _ in expected)
    best = sorted({text: (apart, labels) for text, labels, apart in expected}.items(), key=lambda item: -item[1][0])
    assert [change.difference for change in found.largest] == pytest.approx([one[0] for _, one in best[:8]], abs=1e-5)
    assert [found.largest[0].original, found.largest[0].converted] == best[0][1][1]
    turned = compare_predictions(load_model(str(made / "turned")), linear, texts, 31)
    assert (turned.same, turned.largest[0].original) == (found.same, found.largest[0].original)


def test_other_kinds_of_predictions(made):
    linear, plain = load_converted(str(made / "linear")), load_model(str(made / "original"))
    texts = load_inputs(linear, InputOptions(**given_by(made)), made_by(linear)).texts[:5]
    same = compare_predictions(plain, plain, texts, 31)
    assert same.same == 5 and same.largest[0].difference == 0
    linear.model.config.problem_type = SEVERAL
    several = compare_predictions(plain, linear, texts, 31)
    assert {change.original_probability for change in several.largest} == {None} and several.same <= 5
    linear.model.config.problem_type = NUMBER
    assert compare_predictions(plain, linear, texts, 31).same is None


def test_without_predictions_it_says_why(made):
    found = gather(options(made, "untuned"))
    assert found.changes is None
    assert any("BertForMaskedLM, without a trained head" in what for what in found.left_out)
    found = gather(options(made, None))
    assert any("prediction changed most: there is no original" in what for what in found.left_out)
    assert answer(found).startswith("This model's attention was compared with its own softmax only (total variation 0.")
    linear = load_converted(str(made / "linear"))
    assert "built-in" in why_not(linear, linear, ())
    assert why_not(None, load_model(str(made / "untuned")), ()) == ""


def test_the_inputs_are_built_in_unless_data_is_named(made):
    """Whatever data a record names, it is not read: the record comes from whoever made the checkpoint."""
    linear = load_converted(str(made / "linear"))
    assert made_by(linear).part("options").text("dataset") == "rows.jsonl"
    inputs = load_inputs(linear, InputOptions(inputs=2), made_by(linear))
    assert "built-in" in inputs.description and inputs.texts == () and inputs.length == 31
    assert inputs.notes == [
        "The inputs are built-in ones, not the data that the checkpoint learned from; name it: --dataset."
    ]
    assert load_inputs(linear, InputOptions(inputs=2)).notes == []


def test_lengths_are_those_it_was_taught_on():
    assert read({}).row_length is None and read({"longest_row": 99}).row_length == 99
    record = {"longest_row": 99, "finetuning": {"max_length": 512, "facts": {"longest_row": 300}}}
    assert read(record).row_length == 300


def test_the_sentence_says_only_what_is_known():
    def timed(tokens, seconds, spread=0.1):
        sides = {
            "softmax": Variant(Timing(seconds, spread, 7, seconds, seconds)),
            "linear": Variant(Timing(1.0, spread, 7, 1.0, 1.0)),
        }
        return Row("model", "", tokens, ("softmax", "linear"), sides)

    speeds = [timed(128, 0.5), timed(512, 1.0), timed(2048, 3.0)]
    provenance = {"longest_row": 512, "finetuning": {"score": 0.9, "task": "sst2", "original": {"score": 0.95}}}
    info = SimpleNamespace(max_length=4096, provenance=read(provenance))
    outputs, fidelity = SimpleNamespace(cosine=0.98), SimpleNamespace(mean=lambda name: 0.25)
    found = SimpleNamespace(
        info=info, speeds=speeds, changes=None, outputs=outputs, fidelity=fidelity, picture=None, noise=None
    )
    assert answer(found) == (
        "By its own record this model reaches 0.900 on sst2, the original 0.950 and its outputs have a mean cosine of "
        "0.980 to the original's; one input of 2,048 tokens is read 3.00 times as fast as with softmax, one of 512 is "
        "not faster; it takes up to 4,096 tokens, and it was taught on rows of up to 512."
    )
    found.speeds, found.outputs, info.provenance, info.max_length = speeds[:1], None, read({}), None
    assert answer(found) == (
        "This model's attention was compared with its own softmax only (total variation 0.250, 0 is equal); one input "
        "of 128 tokens takes 2.00 times as long as with softmax; no limit of its length is known, and the checkpoint "
        "does not say what lengths it was taught on."
    )
    # A model and its copy: 0.60 and 0.92 of softmax's time, on a machine that had other work.
    found.speeds = [timed(128, 0.92, spread=0.3)]
    assert "one input of 128 tokens takes as long as with softmax" in answer(found)
    found.noise = SimpleNamespace(too_noisy=True)
    assert "how fast it is cannot be said, as the machine was too noisy" in answer(found)
    found.picture, found.speeds = torch.zeros(3, 24, 32), []
    assert answer(found).endswith("how fast it is was not measured here; it reads pictures of 24 x 32 pixels.")


def test_the_two_columns_of_a_pair_are_recorded(made):
    job = ConvertJob.of(model="m", dataset=str(made / "rows.jsonl"), text_column="text,other")
    assert recorded(job)["text_column"] == "text,other"
