"""What follows from measured numbers, on made-up ones."""

import math

from linearize.evaluation.bench.meter import Timing, in_turns, spread
from linearize.evaluation.bench.rows import Row, Variant, faster_from, ratio


def row(tokens, softmax, linear, what="x"):
    variants = {
        name: Variant(problem="out of memory")
        if seconds is None
        else Variant(Timing(seconds, 0.0, 3, seconds, seconds), 10 * tokens)
        for name, seconds in (("softmax", softmax), ("linear", linear))
    }
    return Row("attention", what, tokens, ("softmax", "linear"), variants)


def test_from_which_length_ours_is_faster():
    assert faster_from([row(512, 1.0, 2.0), row(2048, 2.0, 1.0), row(8192, 8.0, 1.0)]) == 2048
    assert faster_from([row(512, 1.4, 1.0), row(4096, 10.0, 1.0)]) == 512
    assert faster_from([row(512, 0.2, 1.0), row(16384, 0.9, 1.0)]) is None
    # The last change counts, and what did not run does not.
    lengths = {128: (1.2, 1.0), 512: (0.5, 1.0), 1024: (None, 1.0), 2048: (2.0, 1.0)}
    assert faster_from([row(tokens, *times) for tokens, times in lengths.items()]) == 2048
    assert faster_from([row(512, None, 1.0)]) is None


def test_a_row_divides_what_ran():
    made = row(8, 3.0, 1.5)
    assert made.speedup == 2.0 and made.times("linear", over="softmax") == 0.5
    assert made.to_dict()["speedup"] == 2.0 and made.to_dict()["memory_ratio"] == 1.0
    lost = row(8, None, 1.5)
    assert lost.speedup is None and lost.to_dict()["sides"]["softmax"]["problem"] == "out of memory"
    assert ratio(1.0, 0.0) is None


def test_spread_is_of_the_quartiles():
    assert spread([1.0]) == 0.0
    assert math.isclose(spread([1.0, 2.0, 3.0, 4.0, 5.0]), 2.0 / 3.0)


def test_sides_take_turns():
    order = []
    sides = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = in_turns(sides, 2)
    assert order == ["a", "b"] * 3
    assert all(timing.repeats == 2 and timing.fastest > 0 for timing in timings.values())
    order.clear()
    timings = in_turns(sides, 2, warm_up=0.1, calls=3)
    assert order == [*"aaabbb"] * 2 and timings["b"].repeats == 2
    assert in_turns(sides, warm_up=2.0, aim=10.0)["a"].repeats == 5
    assert in_turns(sides, warm_up=2.0, aim=0.1, least=4)["a"].repeats == 4
    assert in_turns(sides, warm_up=1e-9, aim=0.1, most=6)["a"].repeats == 6


def test_a_turn_of_several_calls_is_their_mean():
    timing = Timing.of([5.0, 1.0, 3.0, 9.0, 2.0, 4.0, 7.0, 3.0, 5.0], calls=3)
    assert (timing.seconds, timing.first, timing.repeats, timing.fastest) == (5.0, 7.0, 3, 3.0)
    assert math.isclose(timing.spread, 1.0 / 5.0)
    assert Timing.of([3.0, 1.0, 2.0]) == Timing(2.0, 0.5, 3, 2.0, 1.0)
