"""Run transformers' own model tests on converted models: `python tests/architectures/upstream.py --help`.

Every model's tests run twice, on the original classes and with every class built converted (`upstream_plugin.py`).
What the originals pass and the converted models do not is looked up in `upstream_reasons.yaml`, which says of each test
why it cannot hold for linear attention; whatever it does not name ends the script with exit code 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import transformers
import yaml

HERE = Path(__file__).parent
PAGE, RESULTS = HERE.parents[1] / "docs" / "sweep.md", HERE.parents[1] / "docs" / "results" / "upstream.json"
BEGIN, END = "<!-- upstream: begin -->", "<!-- upstream: end -->"
MODELS = ("bert", "roberta", "gpt2", "llama", "vit", "modernbert", "qwen3")
VERSION = importlib.metadata.version("transformers")

STUB = """import unittest


def __getattr__(name):
    def skip(*args, **kwargs):
        raise unittest.SkipTest(f"{__name__}.{name} is in neither source tree")

    return skip
"""
"""Stands for a module of tests that the installed version's tests import, but neither tree has."""

NOT_RUN = "test_eager_matches_sdpa_inference"
"""Tests that hold two implementations of softmax against each other, two dozen a model."""

Outcomes = dict[str, tuple[str, str]]
"""Of every test by its name: passed, failed or skipped, and why."""


class Reason(NamedTuple):
    """Why tests cannot pass on a converted model.

    Attributes:
        tests: pattern of their names.
        reason: one line.
    """

    tests: re.Pattern[str]
    reason: str


def reasons() -> list[Reason]:
    """Read the reviewed table."""
    table = yaml.safe_load((HERE / "upstream_reasons.yaml").read_text(encoding="utf-8"))
    return [Reason(re.compile(pattern), entry["reason"]) for entry in table for pattern in entry["tests"]]


def source_distribution(work: Path) -> Path:
    """Download and unpack the source distribution of the installed transformers."""
    folder = work / f"transformers-{VERSION}"
    if not folder.is_dir():
        download = ["pip", "download", f"transformers=={VERSION}", "--no-binary", ":all:", "--no-deps"]
        subprocess.run([sys.executable, "-m", *download, "--no-build-isolation", "-d", str(work)], check=True)
        with tarfile.open(next(work.glob(f"transformers-{VERSION}.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
    return folder


def prepare(work: Path, source: Path | None) -> Path:
    """Lay out a tree of tests that runs against the installed transformers, and return it.

    Source distributions hold the tests that all models share (`tests/test_*.py`), not those of single models: these
    come from `source`. Where it is of another version, the shared ones of the installed version are laid over it; tests
    that need what is in neither are skipped.
    """
    distribution = source_distribution(work)
    if source is None and not (distribution / "tests" / "models").is_dir():
        raise SystemExit(
            f"the source distribution of transformers {VERSION} holds no tests/models; give --source FOLDER, a "
            f"checkout of transformers (git clone --depth 1 --branch v{VERSION}, or the nearest version there is)"
        )
    source = source or distribution
    tree = work / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("tests", "utils"):
        shutil.copytree(source / name, tree / name)
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(source / name, tree / name)
    (tree / "src").mkdir()
    (tree / "src" / "transformers").symlink_to(Path(transformers.__file__).parent)
    for file in sorted((distribution / "tests").glob("*.py")):
        shutil.copy(file, tree / "tests" / file.name)
        for name in re.findall(r"^from \.([\w.]+) import", file.read_text(encoding="utf-8"), re.MULTILINE):
            missing = tree / "tests" / f"{name.replace('.', '/')}.py"
            if not missing.is_file() and not missing.with_suffix("").is_dir():
                missing.parent.mkdir(parents=True, exist_ok=True)
                missing.write_text(STUB, encoding="utf-8")
    return tree


def version_of(source: Path | None) -> str:
    """Return the version that a source tree says it is of."""
    if source is None:
        return VERSION
    found = re.search(r'version="([^"]+)"', (source / "setup.py").read_text(encoding="utf-8"))
    return found[1] if found else "unknown"


def run(tree: Path, name: str, converted: bool, tests: str | None, reuse: bool) -> Outcomes:
    """Run the tests of one model, and return how each ended; with `reuse` what an earlier run wrote, where it did."""
    file = tree.parent / f"{name}-{'converted' if converted else 'original'}.json"
    if reuse and file.is_file():
        return _read(file)
    file.unlink(missing_ok=True)
    settings = {
        "UPSTREAM_OUTCOMES": str(file),
        "UPSTREAM_FAMILY": f"transformers.models.{name}.modeling_{name}" if converted else "",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "LINEARIZE_NATIVE": "0",
    }
    options = ["-q", "-p", "upstream_plugin", "-p", "no:cacheprovider", "-W", "ignore", "--timeout", "300"]
    chosen = f"not {NOT_RUN}{f' and ({tests})' if tests else ''}"
    options += ["-o", "addopts=", "-o", "log_cli=0", "-k", chosen]
    command = [sys.executable, "-m", "pytest", f"tests/models/{name}/test_modeling_{name}.py", *options]
    ended = subprocess.run(command, cwd=tree, env=os.environ | settings, capture_output=True, text=True, check=False)
    if not file.is_file():
        raise SystemExit(f"{name}: pytest ended with {ended.returncode}\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}")
    found = _read(file)
    if not found:
        raise SystemExit(f"{name}: no test ran\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}")
    if tests:
        # A part of the tests is nothing to be reused.
        file.unlink()
    return found


def _read(file: Path) -> Outcomes:
    return {test: (status, why) for test, (status, why) in json.loads(file.read_text(encoding="utf-8")).items()}


Found = dict[str, Any]
"""Of one model: how many tests pass, and the list of those that do not."""


def compare(original: Outcomes, converted: Outcomes, table: list[Reason]) -> Found:
    """Count what the original passes and the converted models do too; list the others with their reasons."""
    passed = [test for test, (status, _) in original.items() if status == "passed" and NOT_RUN not in test]
    others = []
    for test in passed:
        status, message = converted.get(test, ("not run", ""))
        if status != "passed":
            short = test.rpartition("::")[2]
            why = next((one.reason for one in table if one.tests.fullmatch(short)), None)
            others.append({"test": short, "status": status, "message": message, "reason": why})
    return {"original": len(passed), "converted": len(passed) - len(others), "others": others}


def render(models: dict[str, Found]) -> str:
    """Write the tables for docs/sweep.md."""
    lines = ["| model | tests that the original passes | of these, converted | others |", "|---|---:|---:|---:|"]
    why: dict[str, dict[str, set[str]]] = {}
    for name, found in sorted(models.items()):
        others = found["others"]
        lines.append(f"| {name} | {found['original']} | {found['converted']} | {len(others)} |")
        for one in others:
            reason = one["reason"] or "not explained: " + one["message"]
            why.setdefault(reason, {}).setdefault(re.sub(r"_\d+_\w+$", "_*", one["test"]), set()).add(name)
    lines += ["", "| why the others do not pass | tests |", "|---|---|"]
    for reason, tests in why.items():
        named = (f"`{test}` ({', '.join(sorted(names))})" for test, names in sorted(tests.items()))
        lines.append(f"| {reason} | {', '.join(named)} |")
    return "\n".join(lines)


def main() -> int:
    """Run the tests and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="scratch folder for the download and the tests")
    parser.add_argument("--source", type=Path, help="checkout of transformers that holds tests/models")
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas (%(default)s)")
    parser.add_argument("--tests", help="only tests that match this, as pytest's -k; nothing is written then")
    parser.add_argument(
        "--reuse", action="store_true", help="take outcomes that earlier runs left in the scratch folder"
    )
    parser.add_argument("--docs", action="store_true", help="write docs/results/upstream.json and docs/sweep.md")
    arguments = parser.parse_args()
    work, source = arguments.work.resolve(), arguments.source and arguments.source.resolve()
    work.mkdir(parents=True, exist_ok=True)
    tree, table = prepare(work, source), reasons()
    models: dict[str, Found] = {}
    for name in arguments.models.split(","):
        original, converted = (run(tree, name, one, arguments.tests, arguments.reuse) for one in (False, True))
        found = models[name] = compare(original, converted, table)
        print(f"{name}: {found['converted']} of {found['original']}", flush=True)
        for one in found["others"]:
            print(f"  {one['test']}: {one['reason'] or one['status'] + ': ' + one['message']}", flush=True)
    if arguments.docs and not arguments.tests:
        write({"transformers": VERSION, "tests": version_of(source)}, models)
    return 1 if any(one["reason"] is None for found in models.values() for one in found["others"]) else 0


def write(versions: dict[str, str], models: dict[str, Found]) -> None:
    """Put results into docs/results/upstream.json, beside those of other models there, and the tables into the page."""
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    merged = known | {name: found | {"versions": versions} for name, found in models.items()}
    RESULTS.write_text(json.dumps({name: merged[name] for name in sorted(merged)}, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{render(merged)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
