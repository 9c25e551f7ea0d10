"""What the plain install does, what each extra brings, and what the source distribution holds."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.checkpoints import make_original, make_text, texts
from support.scripts import script

from linearize.core.errors import EXTRAS

CHECKOUT = Path(__file__).parents[1]
DISTRIBUTION = {
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "onnx_ir": "onnx-ir",
    "sentence_transformers": "sentence-transformers",
}
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
    optional = set().union(
        *(names(extras[extra]) for extra in ("train", "report", "vision", "embed", "export", "gguf", "quantize"))
    )
    assert {name for name in optional if not name.startswith("linearize[")} == known
    assert extras["all"] == ["linearize[embed,export,gguf,report,train,vision]"]


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


def test_readme_of_the_package_page_has_no_relative_link():
    """A page without the repository around it: pictures show where that has an address, else their words do."""
    make, readme = script("setup", CHECKOUT).package_readme, (CHECKOUT / "README.md").read_text(encoding="utf-8")
    targets = [target for _, target in re.findall(r"(!?\[[^\]]*\])\(([^)]+)\)", readme)]
    relative = [target for target in targets if not target.startswith("https://")]
    assert len(relative) > 5 and any(target.endswith(".svg") for target in relative)
    alone = make(readme)
    assert not [target for target in relative if f"]({target})" in alone] and "![" not in alone
    assert all(f"`{target}`" in alone or target in alone for target in relative)
    placed = make(readme, "https://example.org/a/b/")
    assert re.findall(r"!\[[^\]]*\]\(([^)]+)\)", placed) == [
        f"https://example.org/a/b/raw/HEAD/{path}" for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme)
    ]
    assert all(target.startswith("https://") for target in re.findall(r"\[[^\]]*\]\(([^)]+)\)", placed))
    assert make("[a](#b) [c](https://example.org/d)") == "[a](#b) [c](https://example.org/d)"


@pytest.fixture
def copy(tmp_path):
    """The files that git knows, elsewhere: nothing else gets into what is packed."""
    for name in tracked():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes((CHECKOUT / name).read_bytes())
    return tmp_path / "copy"


def tracked():
    found = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    return list(filter(None, found.stdout.split("\0")))


def pack(kind, copy, output):
    """Build an sdist or a wheel of the copy by the backend itself, as nothing can be downloaded; return the file."""
    make = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
    subprocess.run(
        [sys.executable, "-c", make, f"build_{kind}", str(output)], cwd=copy, capture_output=True, check=True
    )
    (found,) = output.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return found


@pytest.mark.slow
def test_the_source_distribution_is_whole_and_makes_the_package(tmp_path, copy):
    """It holds every file of the repository; unpacked elsewhere and installed, the command runs from there."""
    archive = pack("sdist", copy, tmp_path)
    with tarfile.open(archive) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
        file.extractall(tmp_path / "source", filter="data")
    assert set(tracked()) - inside == set()
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


class Clean:
    """An environment with nothing in it but what it is given, from the packages that are installed here."""

    def __init__(self, folder):
        venv.create(folder, with_pip=False)
        self.root, self.bin = folder.parent, folder / "bin"
        (self.site,) = folder.glob("lib/python*/site-packages")

    def add(self, requirements):
        """Link what these requirements ask for, and what that asks for in turn, as pip would bring it."""
        waiting, done = [Requirement(line) for line in requirements], set()
        while waiting:
            asked = waiting.pop()
            key = (canonicalize_name(asked.name), frozenset(asked.extras))
            if key in done or key[0].startswith(("nvidia-", "triton")):
                continue
            done.add(key)
            found = importlib.metadata.distribution(asked.name)
            for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                if not (self.site / top).exists():
                    (self.site / top).symlink_to(Path(found.locate_file(top)))
            waiting += [need for need in map(Requirement, found.requires or ()) if wanted(need, asked.extras)]

    def run(self, *words):
        environment = {"PATH": os.defpath, "HOME": str(self.root), "HF_HUB_OFFLINE": "1", "LINEARIZE_NATIVE": "0"}
        command = [str(self.bin / words[0]), *map(str, words[1:])]
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr[-2000:]}"
        return done.stdout


def wanted(need, extras):
    return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras))


IN_PYTHON = """
import importlib.util, sys
import torch, linearize
from transformers import AutoModel

assert linearize.__file__.startswith(sys.argv[1]), linearize.__file__
assert importlib.util.find_spec("datasets") is None, "the environment is not clean"
model = linearize.convert(AutoModel.from_pretrained(sys.argv[2]), kernel="hedgehog").eval()
linearize.save(model, sys.argv[3])
ids = torch.arange(10)[None]
again = AutoModel.from_pretrained(sys.argv[3]).eval()
assert again.config.linearize and torch.equal(again(ids).last_hidden_state, model(ids).last_hidden_state)
print("SAME")
"""
BACK = """
import sys, linearize, torch
from transformers import AutoModel, AutoTokenizer

model, tokenizer = AutoModel.from_pretrained(sys.argv[1]).eval(), AutoTokenizer.from_pretrained(sys.argv[1])
states = model(**tokenizer("the cat sat on a mat", return_tensors="pt")).last_hidden_state
assert model.config.linearize and bool(torch.isfinite(states).all())
print(tuple(states.shape))
"""


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(tmp_path, copy):
    """With what the plain install asks for and nothing more; then with the extra `train`, by the command line."""
    wheel = pack("wheel", copy, tmp_path)
    clean = Clean(tmp_path / "environment")
    pip = [sys.executable, "-m", "pip", "--python", str(clean.bin / "python"), "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True, capture_output=True)
    (meta,) = clean.site.glob("linearize-*.dist-info")
    about = importlib.metadata.PathDistribution(meta)
    assert about.metadata["Description-Content-Type"] == "text/markdown" and about.metadata["Author"]
    page = about.metadata.get_payload()
    assert page.startswith("# linearize") and "](docs/" not in page and "](.github/" not in page
    needs = [Requirement(line) for line in about.requires]
    clean.add(str(need) for need in needs if wanted(need, ()))

    assert "convert" in clean.run("linearize", "--help")
    assert "flexformer_n" in clean.run("linearize", "kernels")
    plain = make_original(tmp_path / "plain")
    assert "SAME" in clean.run("python", "-c", IN_PYTHON, clean.site, plain, "converted")
    assert "hedgehog" in clean.run("linearize", "inspect", "converted")

    clean.add(str(need).partition(";")[0] for need in needs if wanted(need, ("train",)))
    sizes = "--distill-steps 2 --align-steps 2 --distill-length 16 --batch-size 4 --holdout 8 --device cpu --no-native"
    clean.run("linearize", "convert", plain, "--dataset", texts(tmp_path, 40), *sizes.split(), "--output", "trained")
    assert clean.run("python", "-c", BACK, "trained").startswith("(1, 8, ")
