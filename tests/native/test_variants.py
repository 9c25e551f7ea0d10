"""Libraries that come with a wheel: the fastest that the processor runs, and none that is damaged or of other code."""

import json
import os
import platform
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from linearize.attention import native
from linearize.attention.native import build as building
from linearize.attention.native import calls, locate
from linearize.attention.native.locate import INDEX, describe, packaged

SCRIPT = Path(building.__file__).parents[3] / "scripts" / "make_wheel.py"
NAMES = runpy.run_path(str(SCRIPT))
X86, variants = NAMES["X86"], NAMES["variants"]
PLAIN = ["fpu", "sse2"]
HASWELL = [*PLAIN, "avx", "avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"]
SKYLAKE = [*HASWELL, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]


@pytest.fixture
def shipped(tmp_path):
    """A folder as a wheel has it, with files that are no libraries."""
    entries = []
    for variant in X86:
        file = tmp_path / f"{variant.name}.so"
        file.write_text(variant.name)
        entries.append({**describe(file), "needs": list(variant.needs)})
    write(tmp_path, machine=platform.machine(), sources="abc", libraries=entries)
    return tmp_path


def write(folder, **index):
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("able", "name"),
    [
        (PLAIN, "baseline"),
        (HASWELL, "avx2"),
        (HASWELL[:-1], "baseline"),
        (SKYLAKE, "avx512"),
        ([*SKYLAKE, "avx512_bf16", "amx_tile"], "avx512-bf16"),
        ([], "baseline"),
    ],
)
def test_the_fastest_that_runs_is_chosen(able, name, shipped):
    assert packaged("abc", able, shipped) == shipped / f"{name}.so"


def test_none_without_a_folder_or_for_another_machine(shipped, tmp_path):
    assert packaged("abc", SKYLAKE, tmp_path / "nothing") is None
    write(shipped, machine="other", sources="abc", libraries=[])
    assert packaged("abc", SKYLAKE, shipped) is None


def test_other_sources_and_damage_are_refused(shipped):
    with pytest.raises(OSError, match="other sources"):
        packaged("abd", PLAIN, shipped)
    (shipped / "baseline.so").write_text("basflinf")
    with pytest.raises(OSError, match="hash is different"):
        packaged("abc", PLAIN, shipped)
    (shipped / "baseline.so").unlink()
    with pytest.raises(OSError, match="No such file"):
        packaged("abc", PLAIN, shipped)
    write(shipped, machine=platform.machine(), sources="abc", libraries=[3])
    with pytest.raises(OSError, match="damaged"):
        packaged("abc", PLAIN, shipped)


def test_what_was_compiled_here_comes_first(switch, monkeypatch, tmp_path):
    """-march=native beats a kind of processor; without it the package's library is used, and nothing is compiled."""
    own = locate.compiled()
    monkeypatch.setattr(calls, "shipped", lambda: own)
    assert calls.load().path == own
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert locate.compiled() is None and calls.load().path == own
    monkeypatch.delenv(native.SWITCH)
    native.forget()
    assert not building.worth_building()


def test_other_machines_have_a_baseline():
    assert [variant.name for variant in variants("aarch64")] == ["baseline"]
    assert variants("x86_64") is X86 and X86[-1].needs == ()


LOAD = """
from linearize.attention.native import engine
from linearize.attention.native.build import agreement, check_agreement
import linearize
rows = agreement()
check_agreement(rows)
print(len(rows), engine().path, linearize.__file__)
"""


@pytest.mark.slow
def test_a_wheel_brings_every_library(tmp_path, native_cache):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--output", str(tmp_path)], capture_output=True, text=True, check=True
    )
    wheel = Path(done.stdout.split()[-1])
    assert "py3-none-" in wheel.name and not wheel.name.endswith("any.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    folder = tmp_path / "site" / "linearize" / "attention" / "native" / "variants"
    entries = json.loads((folder / INDEX).read_text())["libraries"]
    assert [entry["file"] for entry in entries] == [f"{variant.name}.so" for variant in variants()]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "XDG_CACHE_HOME": str(tmp_path / "none")}
    environment |= {native.SWITCH: "1"}
    able = set(locate.processor().split())
    for number, entry in enumerate(entries):
        if not able.issuperset(entry["needs"]):
            continue
        # The faster ones taken away, each has its turn.
        index = json.loads((folder / INDEX).read_text()) | {"libraries": entries[number:]}
        (folder / INDEX).write_text(json.dumps(index))
        command = [sys.executable, "-W", "error::RuntimeWarning", "-c", LOAD]
        said = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr
        rows, path, package = said.stdout.split()
        assert int(rows) > 0 and path == str(folder / entry["file"]) and package.startswith(str(tmp_path))
