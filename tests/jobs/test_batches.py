"""How many rows a step has where nobody says: as many as have a number of tokens; what is said is taken as it is."""

from __future__ import annotations

import pytest
from support.checkpoints import make_original

from linearize.jobs.config import AlignJob, ConvertJob, DistillJob
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
