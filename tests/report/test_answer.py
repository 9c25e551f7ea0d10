"""A report answers: its first sentence, and its inputs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from support.checkpoints import WORDS, tokenizer
from support.tiny import converted, original

import linearize
from linearize.checkpoint.loading import load_converted
from linearize.checkpoint.provenance import Provenance
from linearize.core.options import recorded
from linearize.evaluation.bench.meter import Timing
from linearize.evaluation.bench.rows import Row, Variant
from linearize.evaluation.options import InputOptions, ReportOptions
from linearize.evaluation.report.gather import answer
from linearize.evaluation.report.inputs import load_inputs
from linearize.evaluation.report.page import write_report
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
    tokenizer().save_pretrained(root / "original")
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
    original = original and str(made / original)
    return ReportOptions(str(made / "linear"), inputs=given, original=original, lengths=(), device="cpu")


def test_the_page_opens_with_the_answer(made, tmp_path):
    found = write_report(options(made), str(tmp_path / "out"))
    numbers, page = (json.loads((tmp_path / "out/report.json").read_text()), (tmp_path / "out/index.html").read_text())
    assert found.inputs == "3 held-out examples of file rows.jsonl"
    assert numbers["answer"] == (
        f"This model's outputs have a mean cosine of {found.outputs.cosine:.3f} to the original's; its speed was not "
        "measured here; it takes up to 64 tokens, and it was trained on rows of up to 31."
    )
    assert page.index("This model&#39;s outputs") < page.index("<nav")


def test_the_inputs_are_built_in_unless_data_is_named(made):
    """Whatever data a record names, it is not read: the record comes from whoever made the checkpoint."""
    linear = load_converted(str(made / "linear"))
    assert made_by(linear).part("options").text("dataset") == "rows.jsonl"
    description, batches, notes = load_inputs(linear, InputOptions(inputs=2), made_by(linear))
    assert "built-in" in description and batches[0]["input_ids"].shape[1] <= 31
    assert notes == ["These inputs are built in, not the checkpoint's training data; name that with --dataset."]
    assert load_inputs(linear, InputOptions(inputs=2))[2] == []


def test_the_folders_of_the_data_are_not_named(made, tmp_path):
    """A report of a mixture named the folders of all its files."""
    linear, first = load_converted(str(made / "linear")), made / "rows.jsonl"
    second = tmp_path / "a: b" / "more.jsonl"
    second.parent.mkdir()
    second.write_text(first.read_text())
    cases = {
        f"{first}": "file rows.jsonl",
        f"{second}": "file more.jsonl",
        f"{first}=1,{second}=3": "mixture of 25% file rows.jsonl and 75% file more.jsonl",
    }
    for name, said in cases.items():
        found = load_inputs(linear, InputOptions(dataset=name, text_column="text", inputs=2))
        assert found[0] == f"2 held-out examples of {said}"


def test_lengths_are_those_it_was_trained_on():
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
    found = SimpleNamespace(info=info, speeds=speeds, outputs=outputs, fidelity=fidelity, picture=None, noise=None)
    assert answer(found) == (
        "According to its own record this model reaches 0.900 on sst2, the original 0.950 and its outputs have a mean "
        "cosine of 0.980 to the original's; one input of 2,048 tokens is processed 3.00 times as fast as with softmax, "
        "one of 512 is not faster; it takes up to 4,096 tokens, and it was trained on rows of up to 512."
    )
    found.speeds, found.outputs, info.provenance, info.max_length = speeds[:1], None, read({}), None
    assert answer(found) == (
        "This model's attention was compared with its own softmax only (total variation 0.250, where 0 means equal); "
        "one input of 128 tokens takes 2.00 times as long as with softmax; it has no known maximum length, and the "
        "checkpoint does not say which lengths it was trained on."
    )
    # A model and its copy: 0.60 and 0.92 of softmax's time, on a machine that had other work.
    found.speeds = [timed(128, 0.92, spread=0.3)]
    assert "one input of 128 tokens takes as long as with softmax" in answer(found)
    found.noise = SimpleNamespace(too_noisy=True)
    assert "its speed is unknown, as the machine was too noisy" in answer(found)
    found.picture, found.speeds = torch.zeros(3, 24, 32), []
    assert answer(found).endswith("its speed was not measured here; it reads images of 24 x 32 pixels.")


def test_the_two_columns_of_a_pair_are_recorded(made):
    job = ConvertJob.of(model="m", dataset=str(made / "rows.jsonl"), text_column="text,other")
    assert recorded(job)["text_column"] == "text,other"
