"""Libraries that came with the package: one for each kind of processor, made by `scripts/make_wheel.py`.

They lie in the folder `variants` beside this file, with `variants.json`: the hash of the sources that they were made
of, and for each library its file, size, hash and what it needs of the processor, the fastest first.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from linearize.native.trust import read_record, verified

FOLDER = Path(__file__).parent / "variants"
INDEX = "variants.json"


class Variant(NamedTuple):
    """One kind of processor.

    Attributes:
        name: of the library.
        flags: of the compiler.
        needs: what such a processor can do, in the words of /proc/cpuinfo.
    """

    name: str
    flags: tuple[str, ...]
    needs: tuple[str, ...]


_AVX2 = ("avx", "avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
X86 = (
    Variant("avx512-bf16", ("-march=x86-64-v4", "-mavx512bf16"), (*_AVX512, "avx512_bf16")),
    Variant("avx512", ("-march=x86-64-v4",), _AVX512),
    Variant("avx2", ("-march=x86-64-v3",), _AVX2),
    Variant("baseline", ("-march=x86-64",), ()),
)
OTHER = (Variant("baseline", (), ()),)


def variants(machine: str | None = None) -> tuple[Variant, ...]:
    """Return the kinds of processor that libraries are made for, the fastest first."""
    machine = platform.machine() if machine is None else machine
    return X86 if machine.lower() in ("x86_64", "amd64") else OTHER


def packaged(sources: str, able: Iterable[str], folder: Path = FOLDER) -> Path | None:
    """Choose the fastest library of the package that runs here.

    Who can write the package's folder can write its Python code too, so here no owner is asked for, only the hash.

    Args:
        sources: hash of the sources as they are now.
        able: what this processor can do.
        folder: where they lie.

    Returns:
        The library; None where the package came without, or with those for another machine.

    Raises:
        OSError: if one that was promised is missing or damaged, or was made of other sources.
    """
    index = folder / INDEX
    if not index.is_file():
        return None
    found = read_record(index)
    if found.get("machine") != platform.machine():
        return None
    if found.get("sources") != sources:
        raise OSError(f"{folder} holds libraries made of other sources")
    able = set(able)
    entry = next((one for one in _entries(found, index) if able.issuperset(one.get("needs") or ())), None)
    return None if entry is None else verified(folder, entry)


def _entries(found: dict[str, Any], index: Path) -> list[dict[str, Any]]:
    entries = found.get("libraries")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise OSError(f"{index} is damaged")
    return entries
