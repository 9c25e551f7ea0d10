"""The part of a matrix that runs by default covers what it says, and the rest is left to `make slow`."""

import itertools
from pathlib import Path

import pytest
from support.sampling import NOT_QUICK, cover

MATRIX = [frozenset({("a", i), ("b", j), ("c", k)}) for i, j, k in itertools.product(range(6), range(5), range(4))]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("by", "size", "least", "most"), [("values", 1, 6, 9), ("pairs", 2, 30, 45)])
def test_everything_occurs_in_few_cases(by, size, least, most, seed):
    chosen = cover(MATRIX, by, seed)
    assert least <= len(chosen) <= most < len(MATRIX)

    def parts(cases):
        return {part for case in cases for part in itertools.combinations(sorted(case), size)}

    assert parts(MATRIX[number] for number in chosen) == parts(MATRIX)
    assert chosen == cover(MATRIX, by, seed)


def test_bound_parameters_and_single_cases():
    bound = [frozenset({("info", i), ("arguments", i)}) for i in range(7)]
    assert cover(bound, "pairs", 0) == cover(bound, "values", 0) == set(range(7))
    assert cover([frozenset({("a", 0)})], "pairs", 0) == {0}
    assert cover([], "pairs", 0) == set()


def test_the_rest_is_slow(pytester, monkeypatch):
    pytester.makeconftest('pytest_plugins = ["support.sampling"]')
    pytester.makeini("[pytest]\nmarkers = slow\naddopts = --strict-markers -p no:cacheprovider")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.sampled("pairs")
        @pytest.mark.parametrize("a", range(3))
        @pytest.mark.parametrize("b", range(3))
        @pytest.mark.parametrize("c", range(3))
        def test_matrix(a, b, c):
            pass
        """
    )
    assert 9 <= pytester.inline_run("-m", "not slow").countoutcomes()[0] <= 14
    both = (
        pytester.inline_run("-m", "slow").countoutcomes()[0] + pytester.inline_run("-m", "not slow").countoutcomes()[0]
    )
    assert both == pytester.inline_run().countoutcomes()[0] == 27
    assert pytester.inline_run("--quick").countoutcomes()[0] == 2


@pytest.mark.parametrize("name", NOT_QUICK)
def test_what_quick_leaves_out_is_there(name):
    file, _, function = name.partition("::")
    path = Path(__file__).parents[1] / file
    assert path.exists() and (not function or f"def {function}(" in path.read_text())


def test_quick_leaves_out_single_tests(pytester, monkeypatch):
    pytester.makeconftest('pytest_plugins = ["support.sampling"]')
    pytester.makeini("[pytest]\nmarkers = slow\naddopts = --strict-markers -p no:cacheprovider")
    pytester.makepyfile(
        test_of_two="""
        import pytest

        @pytest.mark.parametrize("a", range(3))
        def test_one(a):
            pass

        def test_one_more():
            pass
        """
    )
    monkeypatch.setattr("support.sampling.NOT_QUICK", ("test_of_two.py::test_one",))
    assert pytester.inline_run("--quick").countoutcomes()[0] == 1
    monkeypatch.setattr("support.sampling.NOT_QUICK", ("test_of_two.py",))
    assert pytester.inline_run("--quick").countoutcomes()[0] == 0
