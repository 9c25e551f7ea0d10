"""How many rows a step has where nobody says: as many as have a number of tokens; what is said is taken as it is."""

from __future__ import annotations

import json
import random

import pytest
from support.checkpoints import WORDS, make_original

from linearize.core.events import Noted
from linearize.jobs.config import AlignJob, ConvertJob, DistillJob
from linearize.jobs.convert import convert_checkpoint
from linearize.jobs.task_config import TuneJob


@pytest.mark.parametrize(
    ("length", "rows"), [(None, 32), (16, 32), (256, 32), (257, 16), (512, 16), (1000, 8), (4096, 2), (99999, 1)]
)
def test_stage_one_and_the_alignment_keep_the_tokens_of_a_step(length, rows):
    said = {} if length is None else {"distill_length": length}
    assert ConvertJob.of(model="a", **said).data.batch_size == rows
    assert DistillJob.of(model="a", **said).data.batch_size == rows
    assert AlignJob.of(model="a", **({} if length is None else {"length": length})).data.batch_size == rows
    assert ConvertJob.of(model="a", batch_size=7, **said).data.batch_size == 7
    assert ConvertJob.of(model="a", **said).distill.gradient_accumulation == 1


@pytest.mark.parametrize(("length", "rows"), [(2, 32), (128, 32), (129, 16), (512, 8), (1500, 2), (8192, 1)])
def test_stage_two_keeps_the_rows_of_a_step_and_cuts_it_into_passes(length, rows):
    """Labels are per row: the step stays one of 32 rows, and what it keeps in memory stays the same."""
    given = {"model": "a", "task": "cola", "max_length": length}
    tune = TuneJob.of(**given).tune
    assert (tune.batch_size, tune.gradient_accumulation) == (rows, 32 // rows)
    assert tune.batch_size * tune.gradient_accumulation == 32
    # What is said is taken as it is, and nothing is added to it.
    assert TuneJob.of(**given, batch_size=32).tune.batch_size == 32
    assert TuneJob.of(**given, batch_size=32).tune.gradient_accumulation == 1
    assert TuneJob.of(**given, gradient_accumulation=3).tune.gradient_accumulation == 3


def test_the_length_that_a_checkpoint_was_tuned_with_counts(tmp_path):
    make_original(tmp_path / "bert")
    (tmp_path / "bert" / "finetuning.json").write_text('{"max_length": 1024}')
    job = TuneJob.of(model=str(tmp_path / "bert"), task="cola")
    assert (job.data.max_length, job.tune.batch_size, job.tune.gradient_accumulation) == (1024, 4, 8)


@pytest.fixture
def place(tmp_path):
    """A BERT of 64 tokens, and texts of 100 words."""
    make_original(tmp_path / "bert")
    order = random.Random(0)
    texts = [" ".join(order.choices(WORDS, k=100)) for _ in range(24)]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    return tmp_path


def taught(place, **options):
    """Convert, and return the longest row that was seen, and what was noted."""
    notes = []
    given = {"distill_steps": 2, "align_steps": 0, "batch_size": 2, "holdout": 4, "device": "cpu"}
    given |= {"dataset": str(place / "texts.txt"), "output": str(place / "out"), "overwrite": True}
    convert_checkpoint(
        ConvertJob.of(model=str(place / "bert"), **{**given, **options}),
        lambda event: notes.append(event.text) if isinstance(event, Noted) and "Rows" in event.text else None,
    )
    config = json.loads((place / "out" / "config.json").read_text())
    return config["linearize"]["provenance"]["longest_row"], notes


@pytest.mark.parametrize("kernel", ["hedgehog", "auto"])
def test_rows_are_as_long_as_asked_where_positions_are_extended(place, kernel):
    """Stage one and the alignment read rows of the old length, whatever was asked: the data was opened too early."""
    searched = {"candidates": "hedgehog,t2r", "search_steps": 2, "length": 32}
    more = {"kernel": kernel} | (searched if kernel == "auto" else {})
    assert taught(place, max_length=96, distill_length=80, **more) == (80, [])
    assert taught(place, max_length=96, distill_length=40, **more) == (40, [])
    # Where nobody says, as many as the model took before.
    assert taught(place, max_length=96, **more) == (64, [])


def test_rows_longer_than_the_model_takes_are_said_to_be_cut(place):
    note = "Rows are cut to 64 tokens, the most the model takes (got 80); convert with --max-length"
    assert taught(place, distill_length=80) == (64, [note])


def test_rows_that_fit_into_the_window_are_noted(place):
    """BERT's window of 64 has 32 tokens before each token, and 32 after it."""
    note = "Rows of 33 tokens fit into the window, where attention is exact, so nothing is learned"
    assert taught(place, window=64, distill_length=33) == (33, [f"{note}; give a larger --distill-length"])
    assert taught(place, window=64, distill_length=34) == (34, [])


def test_packed_rows_are_full(tmp_path):
    """The few held-out ones may be shorter; a causal hybrid fades after what it was trained on."""
    make_original(tmp_path / "llama", "llama", "AutoModelForCausalLM")
    texts = [" ".join(random.Random(row).choices(WORDS, k=9)) for row in range(24)]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    options = {"dataset": str(tmp_path / "texts.txt"), "output": str(tmp_path / "out"), "device": "cpu"}
    steps = {"distill_steps": 1, "align_steps": 0, "batch_size": 2, "holdout": 2}
    form = {"window": 4, "packing": True, "distill_length": 48}
    convert_checkpoint(ConvertJob.of(model=str(tmp_path / "llama"), **options, **steps, **form))
    section = json.loads((tmp_path / "out" / "config.json").read_text())["linearize"]
    assert section["provenance"]["longest_row"] == 48
    assert {layer["trained_length"] for layer in section["layers"]} == {48}
