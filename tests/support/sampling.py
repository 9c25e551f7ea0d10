"""Fewer cases of large matrices by default, all of them in `make slow`; and the selection of `make quick`.

A test under `@pytest.mark.sampled("pairs")` runs by default on a seeded part of its cases in which every pair of
values of two parameters occurs, one under `sampled("values")` on one in which every value does, and one under
`sampled("one")` on one case; names behind that say which parameters count, and several marks add up. The other cases
are marked `slow`. LINEARIZE_SAMPLE_SEED draws another part.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import pytest

NOT_QUICK = (
    *("tests/alignment/test_alignment_processes.py", "tests/alignment/test_verb.py", "tests/bench"),
    *("tests/checkpoint/test_other_tools.py", "tests/checkpoint/test_push.py", "tests/checkpoint/test_sentence.py"),
    *("tests/checkpoint/test_standalone.py", "tests/cli"),
    *("tests/distillation/test_memory.py", "tests/distillation/test_processes.py", "tests/distillation/test_resume.py"),
    *("tests/examples", "tests/experiments", "tests/faults", "tests/finetune", "tests/modeling/test_compile.py"),
    *("tests/jobs/test_dry_run.py", "tests/jobs/test_longdoc.py", "tests/native", "tests/numerics", "tests/report"),
    *("tests/test_demo.py", "tests/test_docs.py", "tests/test_packaging.py"),
    *("tests/test_readme.py", "tests/data/test_data_builtin.py::test_prose_is_much_and_english"),
    "tests/fidelity/test_plots.py::test_matplotlib_is_loaded_with_the_first_figure",
    "tests/test_house.py::test_a_module_can_be_the_first_to_be_imported",
)
"""What `--quick` leaves out: whole command lines, trainers, processes, compilers, browsers, sweeps of numerics."""

COMPILES = "native_cache"
"""The fixture that compiles the native op: `--quick` leaves out what needs it."""

QUICK_CASES = 2
"""Cases of one test function that `--quick` runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="a part that takes a minute: few cases, no whole jobs")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sampled(by, *names): 'one' case, or those that cover 'values' or 'pairs' of parameters; others slow"
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Under `-m "not slow"`, build no items for slow cases: there are more of them than of the others."""
    yield
    calls = metafunc._calls
    if calls and without_slow(metafunc.config):
        slow = metafunc.definition.get_closest_marker("slow") is not None
        ready = [call for call in calls if not (slow or any(mark.name == "slow" for mark in call.marks))]
        marks = list(metafunc.definition.iter_markers("sampled"))
        kept = sampled([call.params for call in ready], marks)
        # A test without any case would be built without its arguments; the one slow case is deselected later.
        calls[:] = [call for number, call in enumerate(ready) if number in kept] or calls[:1]


def without_slow(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == "not slow"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is not in the sample as slow; for `--quick`, leave out the rest."""
    for group in groups(items) if not without_slow(config) else ():
        marks = list(group[0].iter_markers("sampled"))
        ready = [item for item in group if item.get_closest_marker("slow") is None]
        kept = sampled([item.callspec.params if hasattr(item, "callspec") else {} for item in ready], marks)
        for number, item in enumerate(ready):
            if number not in kept:
                item.add_marker("slow")
    if config.getoption("--quick"):
        chosen = {item for group in groups(items) for item in quick_part(group, seed())}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]


def groups(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """Return the cases of each test function."""
    found: dict[Any, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(getattr(item, "function", item), []).append(item)
    return list(found.values())


def quick_part(group: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """Return the cases of one function that `--quick` runs."""
    place = group[0].nodeid
    if any(f"{place.partition('[')[0]}::".startswith((f"{name}/", f"{name}::")) for name in NOT_QUICK):
        return []
    if COMPILES in getattr(group[0], "fixturenames", ()):
        return []
    ready = [item for item in group if not any(item.get_closest_marker(name) for name in ("slow", "gpu"))]
    return random.Random(seed).sample(ready, min(QUICK_CASES, len(ready)))


def seed() -> int:
    return int(os.environ.get("LINEARIZE_SAMPLE_SEED", "0"))


def sampled(cases: Sequence[Mapping[str, Any]], marks: Sequence[pytest.Mark]) -> set[int]:
    """Return the positions of the cases, given by their parameters, that the marks of a function keep."""
    if not marks:
        return {*range(len(cases))}
    return set().union(*(cover(values_of(cases, mark.args[1:]), mark.args[0], seed()) for mark in marks))


def values_of(cases: Sequence[Mapping[str, Any]], only: Sequence[str] = ()) -> list[frozenset[Hashable]]:
    """Return for each case of a function which value of each parameter it has, values numbered as they appear."""
    numbers: dict[str, dict[int, int]] = {}
    found = []
    for parameters in cases:
        values = {name: value for name, value in parameters.items() if name in only or not only}
        # The cases of a matrix share the very objects; not all of them can be compared.
        places = {name: numbers.setdefault(name, {}) for name in values}
        found.append(frozenset((n, places[n].setdefault(id(v), len(places[n]))) for n, v in values.items()))
    return found


def cover(cases: Sequence[frozenset[Hashable]], by: str, seed: int) -> set[int]:
    """Choose cases in which everything occurs that occurs in any: single values, or pairs of them; or one case.

    Args:
        cases: the values of each case, (parameter, index).
        by: "one", "values" or "pairs".
        seed: draws the order in which cases are tried.

    Returns:
        Positions of the chosen ones; at least one where there are any.
    """
    size = {"one": 0, "values": 1, "pairs": 2}[by]
    parts = [{frozenset(part) for part in itertools.combinations(sorted(case), min(size, len(case)))} for case in cases]
    order = list(range(len(cases)))
    random.Random(seed).shuffle(order)
    missing: set[Hashable] = set().union(*parts) if parts else set()
    chosen: set[int] = set()
    for least in range(max(map(len, parts), default=0), 0, -1):
        for number in order:
            if len(parts[number] & missing) >= least:
                chosen.add(number)
                missing -= parts[number]
    return chosen
