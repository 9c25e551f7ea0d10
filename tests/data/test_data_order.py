from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from linearize.data.source import apportion, endless


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [(10, [0.7, 0.3], [7, 3]), (10, [1, 1, 1], [4, 3, 3]), (0, [1, 2], [0, 0]), (1, [0.4, 0.6], [0, 1]), (5, [9], [5])],
)
def test_apportion_sums_up(total: int, weights: list[float], shares: list[int]) -> None:
    assert apportion(total, weights) == shares


def test_apportion_hands_on_what_does_not_fit() -> None:
    assert apportion(10, [1, 1], [2, 100]) == [2, 8]
    assert apportion(10, [1, 1], [2, 3]) == [2, 3]


def test_every_epoch_has_each_example_once_in_a_new_order() -> None:
    numbers = list(islice(endless([50], [1.0], seed=3), 150))
    epochs = [numbers[begin : begin + 50] for begin in (0, 50, 100)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[1] == list(islice(endless([50], [1.0], seed=4), 50))


def test_position_continues_the_same_order() -> None:
    for sizes, weights in (([7], [1.0]), ([7, 30, 4], [0.5, 0.2, 0.3])):
        whole = list(islice(endless(sizes, weights, seed=1), 400))
        for position in (0, 1, 6, 7, 41, 123, 300):
            assert list(islice(endless(sizes, weights, seed=1, position=position), 100)) == whole[position:][:100]


def test_mixture_keeps_weights_whatever_the_sizes() -> None:
    numbers = list(islice(endless([100, 900], [0.75, 0.25], seed=0), 10_000))
    counts = Counter(number < 100 for number in numbers)
    assert abs(counts[True] / 10_000 - 0.75) < 0.002
    # The small part is gone through evenly: 7500 draws of 100 examples.
    assert set(Counter(number for number in numbers if number < 100).values()) <= {74, 75, 76}


def test_a_tiny_weight_still_comes() -> None:
    assert 99 in list(islice(endless([99, 1], [1.0, 1e-6], seed=0), 100))
