"""What computes, tested under the instruction sets and threads of other processors: `make test-isa`.

What cannot be had here, such as the way of MKL on AMD's processors, is why results of unlike shapes are never held
against each other to the bit, but within what rounding allows: see `support.rounding`.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from linearize.attention.native.locate import processor

TESTS = Path(__file__).parent
AREAS = ("ops", "kernels", "attention", "native", "numerics", "fidelity")
SHORT = (
    *("ops", "attention/test_masks.py", "fidelity/test_measure.py"),
    "native/test_attention.py::test_padding_does_not_change_real_tokens",
    "native/test_windows.py::test_padding_does_not_change_real_tokens",
)
SETTINGS = {
    "sse": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "LINEARIZE_TEST_FLAGS": "-msse2",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "LINEARIZE_TEST_FLAGS": "-mavx2 -mfma",
    },
    "avx512f": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "LINEARIZE_TEST_FLAGS": "-march=native",
    },
    "compatible": {"MKL_CBWR": "COMPATIBLE"},
}
"""By what a processor has to be able to do, in the words of /proc/cpuinfo; sse and MKL's path for all run anywhere."""


def passes(setting, threads, tests, *flags):
    if platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("the settings are those of x86")
    if setting.startswith("avx") and setting not in processor().split():
        pytest.skip(f"this processor has no {setting}")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own |= SETTINGS[setting]
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
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_all(setting, threads):
    passes(setting, threads, AREAS)
