"""What the plain install does, what each extra brings, and what the source distribution holds."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from support.checkpoints import make_original, make_text

from linearize.errors import EXTRAS

CHECKOUT = Path(__file__).parents[1]
DISTRIBUTION = {"sklearn": "scikit-learn", "PIL": "pillow"}
PLAIN = """
import importlib.metadata, importlib.util, sys

blocked = set(sys.argv[1].split(","))

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

found, version = importlib.util.find_spec, importlib.metadata.version

def find_spec(name, package=None):
    return None if name.partition(".")[0] in blocked else found(name, package)

def version_of(name):
    if name.lower() in {*blocked, "scikit-learn", "pillow"}:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

sys.meta_path.insert(0, Absent())
importlib.util.find_spec, importlib.metadata.version = find_spec, version_of
"""
WORKS = """
import linearize, torch
from linearize.cli import main
from transformers import AutoModel

model = AutoModel.from_pretrained(sys.argv[2])
ids = torch.arange(10)[None]
first = model(ids).last_hidden_state
linearize.save(model, sys.argv[3])
assert torch.equal(AutoModel.from_pretrained(sys.argv[3])(ids).last_hidden_state, first)
plain = AutoModel.from_pretrained(sys.argv[4])
assert linearize.convert(plain, kernel="hedgehog").config.linearize
for words in (["--help"], ["kernels"], ["inspect", sys.argv[2]], ["convert", sys.argv[4], "--help"]):
    assert main(words) == 0, words
for words in (["convert", sys.argv[4], "--output", "x"], ["finetune", sys.argv[2], "--task", "sst2"]):
    print("CODE", words[0], main(words))
try:
    linearize.distill
except linearize.LinearizeError as error:
    print("SAID", error)
"""


def project():
    return tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]


def names(requirements):
    """Return the names of requirements such as `datasets>=4.0`."""
    return {line.partition(">=")[0] for line in requirements}


def test_the_table_of_extras_is_that_of_the_project():
    found = project()
    extras = found["optional-dependencies"]
    for package, extra in EXTRAS.items():
        name = DISTRIBUTION.get(package, package)
        assert name in names(extras[extra]) and name not in names(found["dependencies"])
    known = {DISTRIBUTION.get(package, package) for package in EXTRAS}
    optional = set().union(*(names(extras[extra]) for extra in ("train", "report", "vision")))
    assert {name for name in optional if not name.startswith("linearize[")} == known
    assert extras["all"] == ["linearize[report,train,vision]"]


def test_the_plain_install_loads_runs_and_saves(tmp_path):
    """And says which extra is missing where it needs one."""
    model = make_text(tmp_path / "model")
    plain = make_original(tmp_path / "plain")
    arguments = [",".join(EXTRAS), str(model), str(tmp_path / "again"), str(plain)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PLAIN + WORKS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith(("CODE", "SAID"))]
    assert said[:2] == ["CODE convert 2", "CODE finetune 2"]
    advice = 'which is not installed: pip install "linearize[train]"'
    assert said[2].endswith(advice)
    errors = [line for line in done.stderr.splitlines() if line.startswith("linearize: error")]
    assert len(errors) == 2 and all(line.endswith(advice) for line in errors)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_source_distribution_makes_the_package(tmp_path):
    """Packed, unpacked elsewhere, installed in an environment of its own: the command runs from there."""
    make = "import sys; from setuptools import build_meta as b; print(b.build_sdist(sys.argv[1]))"
    copy = tmp_path / "copy"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    for name in filter(None, tracked.stdout.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((CHECKOUT / name).read_bytes())
    subprocess.run([sys.executable, "-c", make, str(tmp_path)], cwd=copy, capture_output=True, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
        file.extractall(tmp_path / "source", filter="data")
    assert {
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
        "docs/benchmarks.md",
        "tests/conftest.py",
        "recipes/minilm-glue.yaml",
    } <= inside
    (source,) = (tmp_path / "source").iterdir()
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*pip, str(target), str(source)], check=True, capture_output=True)
    code = (
        "import sys, linearize; from linearize.cli import main; print(linearize.__file__); sys.exit(main(['kernels']))"
    )
    environment = os.environ | {"PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(target)) and "flexformer_n" in done.stdout
