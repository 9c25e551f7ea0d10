"""How many rows a step has where nobody says: as many as have a number of tokens; what is said is taken as it is."""

from __future__ import annotations

import json
import random

import pytest
from support.checkpoints import WORDS, make_original, make_text

from linearize.core.events import Noted
from linearize.jobs.config import AlignJob, ConvertJob, DistillJob
from linearize.jobs.convert import convert_checkpoint
from linearize.jobs.finetune import finetune_checkpoint
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


@pytest.mark.parametrize(("task", "length"), [("causal-lm", 1024), ("chat", 1024), ("cola", 128)])
def test_language_models_train_on_longer_rows(tmp_path, task, length):
    """A conversation cut at 128 tokens has lost most answers; a model that takes fewer lowers the length."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 8192}')
    assert TuneJob.of(model=str(tmp_path), task=task).data.max_length == length
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 96}')
    assert TuneJob.of(model=str(tmp_path), task=task).data.max_length == 96


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
    note = "Rows of up to 33 tokens fit into the window, where attention is exact, so kernels learn nothing"
    assert taught(place, window=64, distill_length=33) == (33, [f"{note}; give a larger --distill-length"])
    assert taught(place, window=64, distill_length=34) == (34, [])
    more = {"window": 8, "sinks": 2, "exact_keys": 30, "distill_length": 32}
    note = "Rows of up to 32 tokens fit into the window, where attention is exact, so kernels learn nothing"
    assert taught(place, **more) == (32, [f"{note}; give a larger --distill-length"])
    assert taught(place, **{**more, "distill_length": 33}) == (33, [])
    (place / "texts.txt").write_text("\n".join([" ".join(WORDS[:5])] * 3 + [" ".join(WORDS[5:8])] * 24) + "\n")
    # The held-out row has 5 tokens, some rows to train on have 7.
    note = "Rows of up to 7 tokens fit into the window, where attention is exact, so kernels learn nothing"
    assert taught(place, window=64, distill_length=64) == (7, [f"{note}; train on longer texts"])


def test_packed_rows_are_full(tmp_path):
    """The few held-out ones may be shorter; a causal hybrid fades after what it was trained on."""
    make_original(tmp_path / "llama", "llama", "AutoModelForCausalLM")
    texts = [" ".join(random.Random(row).choices(WORDS, k=9)) for row in range(24)]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    options = {"dataset": str(tmp_path / "texts.txt"), "output": str(tmp_path / "out"), "device": "cpu"}
    steps = {"distill_steps": 1, "align_steps": 0, "batch_size": 2, "holdout": 2}
    form = {"window": 4, "packing": True, "distill_length": 48}
    notes = []
    convert_checkpoint(ConvertJob.of(model=str(tmp_path / "llama"), **options, **steps, **form), notes.append)
    seen = [note.text for note in notes if isinstance(note, Noted) and "Held-out rows" in note.text]
    assert len(seen) == 1 and "training rows 48; hold out more texts (--holdout)" in seen[0]
    section = json.loads((tmp_path / "out" / "config.json").read_text())["linearize"]
    assert section["provenance"]["longest_row"] == 48
    assert {layer["trained_length"] for layer in section["layers"]} == {48}


def test_later_stages_read_rows_as_long_as_those_trained_on(tmp_path):
    """They read 256 unpacked tokens, which fit into a window of 256, so that nothing was learned."""
    section = {"provenance": {"longest_row": 4096, "options": {"packing": True, "query_sample": 256}}}
    values = {"model_type": "linearize", "linearize": section}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = str(tmp_path)
    job = DistillJob.of(model=model)
    rows = (job.distill_length, job.data.packing, job.data.batch_size, job.distill.query_sample)
    assert rows == (4096, True, 2, 256)
    job = AlignJob.of(model=model, batch_size=1)
    assert (job.length, job.data.packing, job.data.batch_size) == (4096, True, 1)
    # Options given explicitly take precedence, pairs cannot be packed, and the teacher may take less.
    given = {"packing": False, "query_sample": None}
    job = DistillJob.of(model=model, distill_length=64, **given)
    assert (job.distill_length, job.data.packing, job.data.batch_size) == (64, False, 32)
    job = DistillJob.of(model=model, **given)
    assert (job.distill_length, job.data.packing, job.distill.query_sample) == (4096, False, None)
    assert not AlignJob.of(model=model, text_column="a,b").data.packing
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 1024}')
    job = AlignJob.of(model=model, teacher=str(tmp_path / "teacher"))
    assert (job.length, job.data.batch_size) == (1024, 8)
    section["provenance"]["longest_row"] = 200
    (tmp_path / "config.json").write_text(json.dumps(values))
    job = DistillJob.of(model=model)
    assert (job.distill_length, job.data.packing, job.data.batch_size) == (None, False, 32)


def test_tuning_on_rows_inside_the_window_is_noted(tmp_path):
    make_text(tmp_path / "linear", "llama", head="AutoModelForCausalLM", window=16)
    (tmp_path / "texts.txt").write_text("\n".join([" ".join(WORDS)] * 40) + "\n")
    notes = []
    for length in (16, 17):
        options = {"max_length": length, "steps": 1, "device": "cpu", "selection_rows": 0}
        data = {"task": "causal-lm", "dataset": str(tmp_path / "texts.txt"), "output": str(tmp_path / str(length))}
        finetune_checkpoint(TuneJob.of(model=str(tmp_path / "linear"), **data, **options), notes.append)
        text = "Rows of up to 16 tokens fit into the window, where attention is exact, so kernels learn nothing"
        assert [note.text for note in notes if isinstance(note, Noted)] == [f"{text}; give a larger --max-length"]


def test_a_hybrid_fades_after_the_longest_row_that_it_was_trained_on(tmp_path):
    """It faded after the longest held-out row, so a few short ones there silenced the kernel."""
    make_original(tmp_path / "llama", "llama", "AutoModelForCausalLM")
    short = [" ".join(WORDS[place : place + 3]) for place in range(5)]
    (tmp_path / "texts.txt").write_text("\n".join([*short * 20, " ".join(WORDS * 4)[:200]]) + "\n")
    options = {"dataset": str(tmp_path / "texts.txt"), "window": 2, "distill_length": 24, "batch_size": 2, "holdout": 2}
    target = tmp_path / "linear"
    job = ConvertJob.of(model=str(tmp_path / "llama"), output=str(target), distill_steps=1, align_steps=0, **options)
    convert_checkpoint(job)
    layers = json.loads((target / "config.json").read_text())["linearize"]["layers"]
    assert {layer["trained_length"] for layer in layers} == {24}
