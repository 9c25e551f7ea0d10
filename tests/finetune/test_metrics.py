"""The package's metrics equal scikit-learn's and scipy's, and come without the network."""

from __future__ import annotations

import evaluate
import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

from linearize.errors import UnknownNameError
from linearize.finetune.metrics import METRICS, metric
from linearize.finetune.metrics.entities import entities
from linearize.finetune.metrics.spans import normalise


def classes(count: int, seed: int, size: int = 200) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(seed)
    true = chance.integers(count, size=size)
    guess = np.where(chance.random(size) < 0.6, true, chance.integers(count, size=size))
    return guess, true


@pytest.mark.parametrize("name", sorted(METRICS))
def test_is_an_evaluate_metric(name):
    assert isinstance(metric(name), evaluate.Metric)


def test_unknown_name():
    with pytest.raises(UnknownNameError, match="Did you mean 'accuracy'"):
        metric("acuracy")


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_classification_equals_scikit_learn(count, seed):
    guess, true = classes(count, seed)
    both = {"predictions": guess, "references": true}
    assert metric("accuracy").compute(**both)["accuracy"] == pytest.approx(sk.accuracy_score(true, guess), abs=1e-12)
    assert metric("matthews").compute(**both)["matthews"] == pytest.approx(sk.matthews_corrcoef(true, guess), abs=1e-12)
    expected = sk.f1_score(true, guess, average="macro")
    assert metric("f1_macro").compute(**both)["f1_macro"] == pytest.approx(expected, abs=1e-12)


def test_f1_equals_scikit_learn():
    guess, true = classes(2, 3)
    found = metric("f1").compute(predictions=guess, references=true)["f1"]
    assert found == pytest.approx(sk.f1_score(true, guess), abs=1e-12)


def test_constant_predictions_have_no_correlation():
    true = [0, 1, 1, 0]
    assert metric("matthews").compute(predictions=[1] * 4, references=true)["matthews"] == 0.0
    assert metric("f1").compute(predictions=[0] * 4, references=[0] * 4)["f1"] == 0.0
    assert metric("pearson").compute(predictions=[1.0] * 4, references=[1.0, 2, 3, 4])["pearson"] == 0.0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_correlations_equal_scipy_with_ties(seed):
    chance = np.random.default_rng(seed)
    true = chance.integers(6, size=150).astype(float)
    guess = true + chance.normal(size=150).round(1)
    both = {"predictions": guess, "references": true}
    assert metric("pearson").compute(**both)["pearson"] == pytest.approx(stats.pearsonr(guess, true)[0], abs=1e-12)
    assert metric("spearman").compute(**both)["spearman"] == pytest.approx(stats.spearmanr(guess, true)[0], abs=1e-12)
    assert metric("mse").compute(**both)["mse"] == pytest.approx(sk.mean_squared_error(true, guess), abs=1e-12)


def test_perplexity_is_over_tokens_not_over_windows():
    found = metric("perplexity").compute(predictions=[10.0, 2.0], references=[5.0, 1.0])
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
    assert entities(tags) == expected


def test_entity_f1():
    true, guess = [["B-A", "I-A", "O", "B-B"]], [["B-A", "I-A", "B-B", "O"]]
    found = metric("entities").compute(predictions=guess, references=true)
    assert found["precision"] == found["recall"] == found["entity_f1"] == 0.5
    assert found["token_accuracy"] == 0.5


def test_spans():
    assert normalise("The  Cat, sat!") == "cat sat"
    found = metric("spans").compute(predictions=["the cat", "dog", ""], references=[["a cat"], ["big dog", "cow"], []])
    assert found["exact_match"] == pytest.approx(2 / 3)
    assert found["span_f1"] == pytest.approx((1 + 2 / 3 + 1) / 3)
