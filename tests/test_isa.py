"""The numerical tests, training included, under the instruction sets and threads of other processors: `make test-isa`.

What cannot be had here, such as the path that MKL takes on AMD's processors, is why results of unlike shapes are never
compared to the bit, but within what rounding allows: see `support.rounding`.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from support.arithmetic import SETTINGS

from linearize.attention.native.locate import processor

TESTS = Path(__file__).parent
THREADED = ("ops", "kernels", "attention", "native", "numerics", "fidelity")
"""Tests whose arithmetic depends on the number of threads."""
AREAS = (
    *THREADED,
    *("alignment", "distillation", "export", "finetune", "generation", "kernel_search", "modeling", "surgery"),
)
SHORT = (
    *("ops", "attention/test_masks.py", "fidelity/test_measure.py"),
    *("alignment/test_align.py", "distillation/test_losses.py"),
    "native/test_attention.py::test_padding_does_not_change_real_tokens",
    "native/test_windows.py::test_padding_does_not_change_real_tokens",
)
NEEDS = {"avx2": "avx2", "avx512": "avx512f"}
"""What a setting needs, as /proc/cpuinfo names it."""


def passes(setting, threads, tests, *flags):
    if platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("the settings are those of x86")
    if setting in NEEDS and NEEDS[setting] not in processor().split():
        pytest.skip(f"this processor has no {setting}")
    pinned = {name for values in SETTINGS.values() for name in values} | {"TORCHINDUCTOR_CACHE_DIR"}
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_") and name not in pinned}
    own |= SETTINGS[setting] | {"LINEARIZE_TEST_ISA": setting}
    own["LINEARIZE_TEST_FLAGS"] = " ".join([own.get("LINEARIZE_TEST_FLAGS", ""), *flags]).strip()
    own |= {"LINEARIZE_TEST_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    # Threads that wait without sleeping take the time of those that work where other tests run too.
    own |= {"OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, *(str(TESTS / test) for test in tests)],
        env=own,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_some():
    # Vectorised as users have it, and compiled in a third of the time.
    passes("avx2", 2, SHORT, "-O1", "-ftree-vectorize")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "own"])
def test_all(setting):
    passes(setting, 1, AREAS)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_threads():
    # The settings above change the instructions; here the processor chooses, and the threads are those of users.
    passes("own", 2, THREADED)
