"""Build a wheel that includes the native op, compiled for several kinds of processors; the best one is chosen at load.

    python scripts/make_wheel.py --output dist

Works in a copy, so the checkout is unchanged. The wheel is for this system and machine type (such as linux_x86_64), for
any Python version that the package allows, and needs no compiler where it is installed.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

from linearize.attention.native.build import compile_library, compiler
from linearize.attention.native.locate import FOLDER, INDEX, describe, processor, sources_hash

CHECKOUT = Path(__file__).resolve().parent.parent
TAKEN = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "linearize", "cli", "recipes")
MAKE = """
import sys
from setuptools import build_meta
print(build_meta.build_wheel(sys.argv[1], {"--build-option": ["--plat-name", sys.argv[2]]}))
"""


class Variant(NamedTuple):
    """One kind of processor.

    Attributes:
        name: name of the library.
        flags: flags for the compiler.
        needs: required processor features, as in /proc/cpuinfo.
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
    """Return the kinds of processors with their own library, the fastest first."""
    machine = platform.machine() if machine is None else machine
    return X86 if machine.lower() in ("x86_64", "amd64") else OTHER


def main(argv: list[str] | None = None) -> int:
    """Compile the libraries, build the wheel, and print its path."""
    names = [variant.name for variant in variants()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="dist", metavar="DIR", help="folder for the wheel (dist)")
    parser.add_argument("--only", action="append", choices=names, help="kind of processor; may be repeated (all)")
    args = parser.parse_args(argv)
    program = compiler()
    if program is None:
        print("make_wheel: got no C compiler, expected gcc or clang; install one, or set CC", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in TAKEN:
            _copy(CHECKOUT / name, copy / name)
        if not _compile_all(program, copy / FOLDER.relative_to(CHECKOUT), set(args.only or names)):
            return 1
        output = Path(args.output).absolute()
        output.mkdir(parents=True, exist_ok=True)
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        done = subprocess.run(
            [sys.executable, "-c", MAKE, str(output), system], cwd=copy, capture_output=True, text=True, check=False
        )
    if done.returncode:
        print(f"make_wheel: building the wheel failed: {done.stderr[-2000:]}", file=sys.stderr)
        return 1
    print(output / done.stdout.split()[-1])
    return 0


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", FOLDER.name))
    else:
        shutil.copy(source, target)


def _compile_all(program: str, folder: Path, wanted: set[str]) -> bool:
    """Compile every wanted library and write the index; return whether all of this succeeded."""
    folder.mkdir()
    able = set(processor().split())
    entries = []
    for variant in variants():
        if variant.name not in wanted:
            continue
        print(f"compiling {variant.name}", file=sys.stderr, flush=True)
        made = folder / f"{variant.name}.so"
        if error := compile_library(program, made, variant.flags, load=able.issuperset(variant.needs)):
            print(f"make_wheel: {variant.name}: {error[-2000:]}", file=sys.stderr)
            return False
        made.with_suffix(".o").unlink()
        entries.append({**describe(made), "needs": list(variant.needs)})
    index = {"machine": platform.machine(), "sources": sources_hash(), "libraries": entries}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return True


if __name__ == "__main__":
    sys.exit(main())
