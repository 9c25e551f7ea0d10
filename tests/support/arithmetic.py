"""The instruction sets that tests compute with: one on all processors by default, the others in `make test-isa`.

Processors round differently, and each brings its own; so a failure under the default setting is one on every machine.
`LINEARIZE_TEST_ISA=avx512 python -m pytest ...` chooses another. Variables that are already set stay.
"""

from __future__ import annotations

import getpass
import os
import platform
import tempfile

SETTINGS = {
    "default": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "LINEARIZE_TEST_FLAGS": "-msse2",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "LINEARIZE_TEST_FLAGS": "-mavx2 -mfma",
    },
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_CBWR": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "LINEARIZE_TEST_FLAGS": "-march=native",
    },
    "own": {},
}
"""By PyTorch's name of the instruction set; "own" leaves all libraries their choice for this processor."""


def unset() -> dict[str, str]:
    """Return the variables of the chosen setting that are not set; torch and the tests' native op read them."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    setting = os.environ.get("LINEARIZE_TEST_ISA", "avx2" if is_x86 else "own")
    # Code that torch.compile made for other instructions hangs or crashes, and its cache does not tell them apart.
    cache = os.path.join(tempfile.gettempdir(), f"linearize-compiled-{getpass.getuser()}-{setting}")
    values = {**SETTINGS[setting], "TORCHINDUCTOR_CACHE_DIR": cache}
    return {name: value for name, value in values.items() if name not in os.environ}
