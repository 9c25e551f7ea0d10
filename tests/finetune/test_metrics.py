"""Metrics equal their definitions, written out here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from linearize.training.stage_two.metrics import (
    METRICS,
    agreement,
    entities,
    entities_of,
    entity_counts,
    normalise,
    perplexity,
    spans,
)


def classes(count: int, seed: int, size: int = 200) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(seed)
    true = chance.integers(count, size=size)
    guess = np.where(chance.random(size) < 0.6, true, chance.integers(count, size=size))
    return guess, true


def value(name, guess, true):
    return METRICS[name](np.asarray(guess), np.asarray(true))[name]


def f1(guess, true, label):
    """2 TP / (2 TP + FP + FN); 0 where the class occurs on neither side."""
    hits = int(np.sum((guess == label) & (true == label)))
    total = int(np.sum(guess == label)) + int(np.sum(true == label))
    return 2 * hits / total if total else 0.0


def matthews(guess, true):
    """The R_K statistic of Gorodkin 2004, for any number of classes."""
    labels = np.union1d(guess, true)
    one_hot = [(side[:, None] == labels).astype(float) for side in (guess, true)]
    x, y = (side - side.mean(axis=0) for side in one_hot)
    return float(np.sum(x * y) / np.sqrt(np.sum(x * x) * np.sum(y * y)))


def pearson(one, two):
    a, b = one - one.mean(), two - two.mean()
    return float((a @ b) / np.sqrt((a @ a) * (b @ b)))


def ranks(values):
    """Ranks from 1; equal numbers share the mean of theirs."""
    return np.array([(values < value).sum() + ((values == value).sum() + 1) / 2 for value in values])


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_classification_equals_its_definition(count, seed):
    guess, true = classes(count, seed)
    assert value("accuracy", guess, true) == pytest.approx(np.mean(guess == true), abs=1e-12)
    assert value("matthews", guess, true) == pytest.approx(matthews(guess, true), abs=1e-12)
    expected = np.mean([f1(guess, true, label) for label in range(count)])
    assert value("f1_macro", guess, true) == pytest.approx(expected, abs=1e-12)
    assert value("f1", guess, true) == pytest.approx(f1(guess, true, 1), abs=1e-12)


def test_f1_macro_is_over_the_classes_that_occur_on_either_side():
    guess, true = np.array([0, 0, 5, 5]), np.array([0, 2, 5, 2])
    found = value("f1_macro", guess, true)
    assert found == pytest.approx((2 / 3 + 0 + 2 / 3) / 3, abs=1e-12)


def test_constant_predictions_have_no_correlation():
    true = [0, 1, 1, 0]
    assert value("matthews", [1] * 4, true) == 0.0
    assert value("f1", [0] * 4, [0] * 4) == 0.0
    assert value("pearson", [1.0] * 4, [1.0, 2, 3, 4]) == 0.0


@pytest.mark.parametrize(
    ("name", "guess", "true", "expected"),
    [
        ("matthews", [0, 0, 0], [0, 0, 0], 0.0),
        ("matthews", [0, 1, 1], [2, 2, 2], 0.0),
        ("accuracy", [3, 3], [3, 3], 1.0),
        ("f1", [0, 2], [2, 0], 0.0),
        ("f1", [1, 1], [1, 1], 1.0),
        ("f1_macro", [4, 4], [4, 4], 1.0),
        ("spearman", [1.0, 2.0], [3.0, 3.0], 0.0),
        ("spearman", [2.0], [3.0], 0.0),
        ("pearson", [2.0], [3.0], 0.0),
        ("pearson", [0.1] * 3, [1.0, 2.0, 3.0], 0.0),
        ("pearson", [1.0, 2.0], [5.0, 3.0], -1.0),
        ("roc_auc", [0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1], 0.75),
        ("roc_auc", [0.5, 0.5, 0.2], [0, 1, 1], 0.25),
    ],
)
def test_one_class_one_row_and_constants(name, guess, true, expected, recwarn):
    assert value(name, guess, true) == expected
    assert [str(one.message) for one in recwarn if "sklearn" in one.filename or "scipy" in one.filename] == []


def test_one_class_has_no_area_under_the_curve():
    assert math.isnan(value("roc_auc", [0.1, 0.9], [1, 1]))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_correlations_equal_their_definition_with_ties(seed):
    chance = np.random.default_rng(seed)
    true = chance.integers(6, size=150).astype(float)
    guess = true + chance.normal(size=150).round(1)
    assert value("pearson", guess, true) == pytest.approx(pearson(guess, true), abs=1e-12)
    assert value("spearman", guess, true) == pytest.approx(pearson(ranks(guess), ranks(true)), abs=1e-12)
    assert value("mse", guess, true) == pytest.approx(np.mean((guess - true) ** 2), abs=1e-12)


def test_perplexity_is_over_tokens_not_over_windows():
    found = perplexity(np.array([10.0, 2.0]), np.array([5.0, 1.0]))
    assert found["perplexity"] == pytest.approx(np.exp(12 / 6))
    assert found["tokens"] == 6


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["B-PER", "I-PER", "O"], {("PER", 0, 2)}),
        (["I-PER", "B-PER", "I-LOC"], {("PER", 0, 1), ("PER", 1, 2), ("LOC", 2, 3)}),
        (["O", "B-LOC"], {("LOC", 1, 2)}),
        (["N", "V", "O"], {("N", 0, 1), ("V", 1, 2)}),
        ([], set()),
    ],
)
def test_entities(tags, expected):
    assert entities_of(tags) == expected


def test_entity_f1():
    true, guess = ["B-A", "I-A", "O", "B-B"], ["B-A", "I-A", "B-B", "O"]
    found = entities(np.array([entity_counts(guess, true)]))
    assert found["precision"] == found["recall"] == found["entity_f1"] == 0.5
    assert found["token_accuracy"] == 0.5


def test_spans():
    assert normalise("The  Cat, sat!") == "cat sat"
    answers = {"the cat": ["a cat"], "dog": ["big dog", "cow"], "": []}
    found = spans(np.array([agreement(guess, known) for guess, known in answers.items()]))
    assert found["exact_match"] == pytest.approx(2 / 3)
    assert found["span_f1"] == pytest.approx((1 + 2 / 3 + 1) / 3)
