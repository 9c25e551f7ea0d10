"""Slips that no other quick test noticed: one off, a seed ignored, another level of an interval, a dropped last row."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.tasks import WORDS, no_rows, word_tokenizer, write

from linearize.cli.evaluate import print_few
from linearize.data.encode import TextEncoder
from linearize.data.records import paired_anew
from linearize.evaluation.report.paired import mean_difference, score_difference
from linearize.fidelity.ablate import merit_of
from linearize.jobs.evaluate import rows_of_tokens
from linearize.jobs.longdoc import tuning_job
from linearize.jobs.recipes.recipe import cells, load_recipe
from linearize.jobs.task_config import LongdocJob
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.intervals import Score, percentiles
from linearize.training.stage_two.metrics import EDGES, METRICS, range_sums
from linearize.training.stage_two.prepare import hold_out
from linearize.training.stage_two.rows import by_length
from linearize.training.stage_two.splits import open_splits
from linearize.training.stage_two.task_types.base import TaskData
from linearize.training.stage_two.task_types.images import ImageClassification
from linearize.training.stage_two.task_types.language import Copies, Windows, strided
from linearize.training.stage_two.task_types.text import mean_over_chunks
from linearize.training.stage_two.task_types.tokens import LONGEST, best_answers
from linearize.training.stage_two.tasks import TASKS, above_chance, recovery
from linearize.training.stage_two.tuner import Tuner

EVEN = np.arange(1001) / 1000


def test_intervals_cover_95_percent():
    """The ends of resampled scores are at 2.5 and 97.5 %, also of a difference; 5 and 95 % passed all tests."""
    assert percentiles(EVEN) == pytest.approx((0.025, 0.975), abs=1e-12)
    assert Score(score=0.5, resampled=EVEN).interval == pytest.approx((0.025, 0.975), abs=1e-12)
    sides = Score(score=0.5, resampled=EVEN), Score(score=0.0, resampled=0 * EVEN)
    found = score_difference(TASKS["sst2"], "accuracy", "a", "b", *sides)
    assert found.interval == pytest.approx((0.025, 0.975), abs=1e-12)


@pytest.mark.parametrize("count", [6, 8, 11])
def test_the_paired_interval_has_the_ranks_of_95_percent(count):
    """Hartigan's: of the 2^n - 1 means over subsets, those of the ranks 0.025 2^n and 0.975 2^n."""
    values = np.random.default_rng(count).exponential(size=count)
    subsets = [s for k in range(1, count + 1) for s in itertools.combinations(values, k)]
    means = sorted(float(np.mean(s)) for s in subsets)
    rank = int(0.025 * 2**count)
    found = mean_difference("KL", "a", values, "b", np.zeros(count)).interval
    assert found == pytest.approx((means[rank - 1], means[-rank]), rel=1e-9)


def test_the_gain_of_a_kernel_has_the_interval_of_95_percent():
    """Of one large row among equal ones: it is drawn k times with the probabilities of a binomial."""
    rows = torch.ones(40, 3, dtype=torch.float64)
    rows[:, 1] = torch.arange(40) % 2 * 4.0
    low, high = merit_of(rows).interval
    # sqrt(share * 4) - 1, where the share is a binomial of 40 draws around one half.
    assert (low + 1) ** 2 / 4 == pytest.approx(0.5 - 1.96 * (0.25 / 40) ** 0.5, abs=0.02)
    assert (high + 1) ** 2 / 4 == pytest.approx(0.5 + 1.96 * (0.25 / 40) ** 0.5, abs=0.02)


def test_the_seed_decides_which_rows_are_held_out(tmp_path):
    write(tmp_path / "train.jsonl", [{"sentence": f"{WORDS[n % 12]} {n}", "label": n % 2} for n in range(60)])
    rows = {
        seed: open_splits(TASKS["sst2"], str(tmp_path), DataOptions(seed=seed)).validation.rows.tolist()
        for seed in (0, 1, 2)
    }
    assert len({*map(tuple, rows.values())}) == 3 and {len(held) for held in rows.values()} == {6}
    kind = no_rows("sst2").type
    data = TaskData(kind, [{"labels": n} for n in range(60)], [], "rows")
    chosen = {seed: tuple(hold_out(data, 10, seed=seed).selection.places) for seed in (0, 1, 2)}
    assert len({*chosen.values()}) == 3 and all(len(places) == 10 for places in chosen.values())
    assert chosen[1] == tuple(hold_out(data, 10, seed=1).selection.places)


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_packing_keeps_every_token(extra):
    """A last row of one token is a row as well."""
    encoder = TextEncoder(word_tokenizer(), 8, packed=True)
    # [CLS], the words and [SEP], which ends a text: 8 tokens, and then 8 + extra.
    texts = [" ".join(["good"] * 6), " ".join(["bad"] * (6 + extra))]
    rows = list(encoder.pack(texts, keep_rest=True))
    expected = [token for text in texts for token in encoder.tokenizer(text)["input_ids"]]
    assert [token for row in rows for token in row.tolist()] == expected
    assert [len(row) for row in rows] == [8, 8, *([extra] if extra else [])]
    assert [len(row) for row in encoder.pack(texts, keep_rest=False)] == [8, 8]


@pytest.mark.parametrize(("count", "windows"), [(7, 1), (8, 1), (15, 1), (16, 2), (17, 2)])
def test_windows_use_all_full_rows(count, windows):
    tokens = np.arange(count, dtype=np.int32)
    assert len(Windows(tokens, 8)) == windows
    assert np.concatenate(
        [row["input_ids"] for row in map(Windows(tokens, 8).__getitem__, range(windows))]
    ).tolist() == (list(range(min(count, 8 * windows))))


@pytest.mark.parametrize(("count", "length", "stride"), [(20, 8, 7), (21, 8, 3), (8, 8, 5), (9, 8, 1)])
def test_every_token_but_the_first_is_predicted_once(count, length, stride):
    windows = Windows(np.arange(count, dtype=np.int32), length, strided(count, length, stride))
    seen = [int(token) for n in range(len(windows)) for token in windows[n]["labels"] if token >= 0]
    assert seen == list(range(1, count))


def test_the_first_token_of_a_second_reading_does_not_count():
    row = Copies(np.arange(10, 18, dtype=np.int32), 4)[1]
    assert row["input_ids"].tolist() == [14, 15, 16, 17] * 2
    assert row["labels"].tolist() == [-100] * 5 + [15, 16, 17]


def test_ranges_of_positions_begin_at_their_edges():
    """The token at place t + 1 has t + 1 before it: 63 is the last of the first range."""
    width = EDGES[2] + 1
    nll, counted = torch.arange(1.0, width + 1)[None], torch.ones(1, width)
    sums, counts, last = range_sums(nll, counted)[0].chunk(3)
    assert counts[:3].tolist() == [63, 64, 2] and last[:3].tolist() == [63, 127, 129]
    assert sums[:3].tolist() == [63 * 64 / 2, sum(range(64, 128)), 128 + 129]


def test_recall_at_ten_includes_the_tenth():
    found = METRICS["retrieval"](np.array([1, 10, 11]))
    assert (found["recall_at_1"], found["recall_at_10"]) == pytest.approx((1 / 3, 2 / 3))
    assert found["mrr"] == pytest.approx((1 + 1 / 10 + 1 / 11) / 3)


def test_chunks_of_a_text_are_averaged_over_their_number():
    values = torch.tensor([[1.0], [3.0], [8.0]])
    ids = torch.arange(3)[:, None]
    found = mean_over_chunks(lambda input_ids: values[input_ids[:, 0]], torch.tensor([0, 0, 1]), {"input_ids": ids})
    assert found.tolist() == [[2.0], [8.0]]


def test_chance_itself_is_not_above_chance():
    task = TASKS["sst2"]
    assert not above_chance(task, 0.5, chance=0.5) and above_chance(task, 0.51, chance=0.5)
    assert not above_chance(task, 0.6, chance=0.5, interval=(0.5, 0.7))
    assert recovery(task, 0.7, 0.9, chance=0.5) == pytest.approx(50.0)


def test_the_longest_answer_has_thirty_tokens():
    width = LONGEST + 2
    row = {"owner": 0, "offsets": [(n, n + 1) for n in range(width)]}
    text = "".join(chr(97 + n % 26) for n in range(width))
    for last, expected in ((LONGEST, text[1 : LONGEST + 1]), (LONGEST + 1, "")):
        start, end = np.full((1, width), -9.0), np.full((1, width), -9.0)
        start[0, 1] = end[0, last] = 9.0
        found = best_answers(start, end, [row], [text], False)[0]
        assert found == expected if expected else len(found) < LONGEST


def test_predictions_come_back_in_the_order_of_the_rows():
    """Rows are measured from the longest to the shortest; an order that is its own inverse shows no slip."""
    lengths = [3, 1, 4, 2]
    order = by_length([{"input_ids": [0] * length} for length in lengths])
    assert order == [2, 0, 3, 1]
    tuner = SimpleNamespace(order=order)
    tuner._as_given = lambda values: Tuner._as_given(tuner, values)
    measured = np.array([lengths[place] for place in order])
    assert tuner._as_given(measured).tolist() == lengths
    assert [part.tolist() for part in tuner._as_given((measured, measured))] == [lengths, lengths]


def test_a_batch_has_no_more_tokens_than_were_asked_for():
    assert [rows_of_tokens(64, length) for length in (1, 2, 3, 16, 64, 65)] == [32, 32, 21, 4, 1, 1]


def test_new_pairs_and_crops_depend_on_the_seed_and_the_pass():
    firsts, seconds = [f"a {n}" for n in range(40)], [f"b {n}" for n in range(40)]
    pairs = {seed: tuple(paired_anew(firsts, seconds, 20, seed)) for seed in (0, 1)}
    assert pairs[0] != pairs[1] and pairs[1] == tuple(paired_anew(firsts, seconds, 20, 1))
    pixels = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def crop(seed, epoch):
        kind = ImageClassification(TASKS["cifar10"], options=DataOptions(seed=seed))
        kind.epoch, kind.encoder = epoch, lambda examples, keep: {"pixel_values": pixels}
        kind.numbered = lambda examples: [0] * len(examples)
        return kind.collate([{"example": None, "place": n, "augment": True} for n in range(4)])["pixel_values"]

    assert torch.equal(crop(0, 0), crop(0, 0))
    assert not torch.equal(crop(0, 0), crop(0, 1)) and not torch.equal(crop(0, 0), crop(1, 0))


def test_the_seed_of_a_job_is_that_of_its_rows():
    recipe = load_recipe("minilm-glue", ["seeds=[3,5]", "data=./glue"])
    assert {(cell.seed, cell.read.rows.seed) for cell in cells(recipe)} == {(3, 3), (5, 5)}
    job = LongdocJob.of(model="m", task="text-classification", dataset="d", output="o", max_length=64, seed=7)
    tuned = tuning_job(job, "m", Path("o"), 64)
    assert (tuned.data.seed, tuned.tune.seed) == (7, 7)


@pytest.mark.parametrize(("count", "said"), [(8, True), (59, True), (60, False)])
def test_few_rows_are_said_to_have_narrow_intervals(count, said):
    lines = []
    print_few(SimpleNamespace(print=lines.append), count)
    assert [f"over {count} rows is too narrow" in line for line in lines] == [True] * said
