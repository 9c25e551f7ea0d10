"""A score with its interval and chance level: against values worked out by hand, and by the normal approximation."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from support.tasks import no_rows, resampled_scores, word_tokenizer

from linearize.data.encode import tokenise
from linearize.evaluation.report.paired import score_difference
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.intervals import RESAMPLES, chance_level, measured, percentiles, resampled_metrics
from linearize.training.stage_two.metrics import entities
from linearize.training.stage_two.rows import IGNORED, row_facts
from linearize.training.stage_two.tasks import TASKS, recovery


@pytest.fixture(autouse=True)
def all_resamples(few_resamples, monkeypatch):
    monkeypatch.setitem(resampled_metrics.__kwdefaults__, "resamples", RESAMPLES)


def score_interval(name, predictions, labels, **options):
    return percentiles(resampled_scores(no_rows(name), predictions, labels, **options))


def logits(guesses, classes=2):
    return np.eye(classes)[guesses]


def test_the_interval_of_an_accuracy_is_that_of_the_binomial():
    chance = np.random.default_rng(0)
    labels = chance.integers(2, size=400)
    guesses = np.where(chance.random(400) < 0.8, labels, 1 - labels)
    share = float(np.mean(guesses == labels))
    low, high = score_interval("sst2", logits(guesses), labels)
    half = 1.96 * math.sqrt(share * (1 - share) / 400)
    assert low == pytest.approx(share - half, abs=0.01) and high == pytest.approx(share + half, abs=0.01)
    assert (low, high) == score_interval("sst2", logits(guesses), labels)


def test_no_interval_where_nothing_varies():
    labels = np.array([0, 1] * 10)
    assert score_interval("sst2", logits(labels), labels, resamples=20) == (1.0, 1.0)


def test_one_row_has_no_interval_and_no_difference():
    """All draws of one row are equal: an interval of zero width made every difference significant."""
    for rows in (1, 2):
        labels, data = np.arange(rows), no_rows("sst2")
        found = dataclasses.replace(measured(data, {"accuracy": 1.0}, logits(labels), labels), units=rows)
        assert (found.interval is None) == (rows == 1)
        difference = score_difference(
            data.task, "accuracy", "one", "other", found, dataclasses.replace(found, score=0.5)
        )
        assert (difference is None) == (rows == 1)


def test_units_drawn_without_a_class_do_not_count():
    """One of 10,000 resamples without a duplicate made the interval NaN, so a perfect model was not above chance."""
    labels = np.array([1, 1] + [0] * 18)
    scores = resampled_scores(no_rows("duplicates"), labels + np.linspace(0, 0.5, 20), labels)
    missed = np.isnan(scores)
    assert missed.mean() == pytest.approx(0.9**20, abs=0.01) and percentiles(scores) == (1.0, 1.0)
    scores[np.flatnonzero(~missed)[::2]] = 0.5
    assert percentiles(scores) == (0.5, 1.0) and np.isnan(percentiles(scores[missed])).all()


def test_windows_are_drawn_with_their_counts():
    """A perplexity is over tokens: a window counts as much as it has of them."""
    sums = np.array([[10.0, 5.0], [6.0, 3.0], [2.0, 1.0]])
    low, high = score_interval("chat", sums, np.zeros((3, 4)), resamples=50)
    assert low == pytest.approx(math.exp(2)) and high == pytest.approx(math.exp(2))
    assert chance_level(no_rows("chat"), np.zeros((3, 4))) is None


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("sst2", [0, 1, 1, 1], 0.75),
        ("sst2", [0, 1] * 5, 0.5),
        ("cola", [0, 1, 1, 1], 0.0),
        # All positive: accuracy 3/4, F1 6/7.
        ("mrpc", [0, 1, 1, 1], (0.75 + 6 / 7) / 2),
        ("stsb", [0.5, 3.0, 2.0], 0.0),
    ],
)
def test_chance(name, labels, expected):
    assert chance_level(no_rows(name), np.array(labels)) == pytest.approx(expected)


def test_chance_of_tags_is_the_most_frequent_one():
    data = no_rows("token-classification", labels=("O", "B-A"), score=("token_accuracy",))
    assert chance_level(data, np.array([[0, 0, 1, IGNORED], [0, IGNORED, IGNORED, IGNORED]])) == pytest.approx(0.75)


def test_a_coin_flip_recovers_nothing():
    """50 % on balanced rows was reported as 96.8 % of an original with 51.7 %."""
    assert recovery(TASKS["sst2"], 0.5, 0.517) == pytest.approx(96.7, abs=0.1)
    assert recovery(TASKS["sst2"], 0.5, 0.517, chance=0.5, interval=(0.47, 0.56)) is None
    assert recovery(TASKS["sst2"], 0.5, 0.9, chance=0.5, interval=(0.88, 0.92)) == 0.0
    assert recovery(TASKS["sst2"], 0.88, 0.9, chance=0.5, interval=(0.88, 0.92)) == pytest.approx(95.0)
    assert recovery(TASKS["cola"], 0.45, 0.5, chance=0.0, interval=(0.4, 0.6)) == pytest.approx(90.0)
    assert recovery(TASKS["causal-lm"], 20.0, 18.0, chance=None, interval=(17.0, 19.0)) == pytest.approx(90.0)


def test_the_share_of_rows_that_were_cut():
    tokenizer = word_tokenizer()
    texts = ["a", "a a a a a a", "a a a a", "a a a a a a a a a"]
    longest = [len(tokenizer(text)["input_ids"]) for text in texts]
    length = longest[1]
    lengths = [len(row["input_ids"]) for row in tokenise(tokenizer, texts)]
    assert row_facts(lengths, DataOptions(max_length=length)) == {
        "rows": 4, "max_length": length, "longest_row": longest[3], "cut_share": 0.25
    }  # fmt: skip
    assert row_facts(lengths, DataOptions(max_length=length - 1))["cut_share"] == 0.5
    pairs = [len(row["input_ids"]) for row in tokenise(tokenizer, texts, texts)]
    assert row_facts(pairs, DataOptions(max_length=100))["cut_share"] == 0.0
    assert row_facts(pairs, DataOptions(max_length=100, auto_length=True))["max_length"] == 2 * longest[3] - 1


def test_the_ends_hardly_move_with_the_seed():
    """With 500 resamples an end moved by 2 points with the seed."""
    labels = np.array([0] * 24 + [1] * 40)
    guesses = np.array([0, 1] * 32)
    ends = [score_interval("sst2", logits(guesses), labels, seed=seed) for seed in range(4)]
    # A row of 64 is 1.6 points, and an end is one of these values.
    assert np.ptp(ends, axis=0).max() <= 1 / 64


@pytest.mark.parametrize("task", ["text-classification", "image-classification"])
def test_macro_f1_is_measured_where_classes_are_uneven(task):
    data = no_rows(task, labels=("a", "b"))
    labels = np.array([0] * 24 + [1] * 40)
    constant = logits(np.ones(64, dtype=int))
    found = measured(data, data.type.compute_metrics(constant, labels), constant, labels).balanced
    # The constant answer has 40 / 52 in one of two classes; guessing in proportion has 1/2.
    assert found.score == pytest.approx(40 / 104) and found.chance == 0.5
    even = np.array([0, 1] * 32)
    assert measured(data, data.type.compute_metrics(constant, even), constant, even).balanced is None
    assert measured(no_rows("sst2"), {"accuracy": 0.5}, constant, labels).balanced is None


def test_entities_are_drawn_by_the_sentence():
    """Their F1 on drawn rows is that of the rows themselves, from counts that are taken once."""
    labels = np.array([[1, 2, 0, 1], [0, 0, 1, IGNORED], [1, 0, 1, 0]])
    guesses = np.array([[1, 2, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0]])
    data = no_rows("token-classification", labels=("O", "B-A", "I-A"))
    (counts,) = data.type.units(guesses, labels)
    # Right, predicted and true entities; right tokens, and all that count.
    assert counts.tolist() == [[1, 1, 2, 3, 4], [0, 1, 1, 1, 3], [2, 2, 2, 4, 4]]
    found = resampled_scores(data, guesses, labels, resamples=5, seed=3)
    chance = np.random.default_rng(3)
    for score in found:
        drawn = chance.integers(3, size=3)
        assert score == pytest.approx(entities(counts[drawn])["entity_f1"])


def test_the_interval_of_a_perplexity_per_word_has_the_words_of_the_drawn_rows():
    """The first window predicts all its tokens, later ones only the stride; a draw may have it three times."""
    data = no_rows("causal-lm")
    data.type.words, data.type.tokens = 50, 100
    sums = np.array([[2.0 * tokens, tokens] for tokens in (60, 10, 10, 10, 10)])
    drawn = [found["word_perplexity"] for found in resampled_metrics(data, sums, sums, resamples=50)]
    assert drawn == pytest.approx([math.exp(200 / 50)] * 50)
    assert data.type.metrics(sums[:, 0], sums[:, 1])["word_perplexity"] == pytest.approx(math.exp(200 / 50))
