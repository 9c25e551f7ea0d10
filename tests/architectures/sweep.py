"""Try every modeling file of transformers, and timm's families: `python tests/architectures/sweep.py --help`.

Every model is tried in a process of its own, forked from one that has imported what all need, and stopped after a
while. The results are one JSON object a line; `table.py` writes them into docs/models.md and docs/sweep.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("LINEARIZE_NATIVE", "0")

import torch
import transformers
from architectures.overrides import TIMM_ARGUMENTS, TIMM_MORE, TIMM_SIZES
from architectures.shrink import open_gates
from architectures.trial import FAILED, Result, build, example_inputs, try_model
from transformers import PreTrainedModel

from linearize.conversion.timm import wrap

DISPATCH = "ALL_ATTENTION_FUNCTIONS"
"""What a modeling file says that goes through the attention interface."""


def modeling_files() -> list[str]:
    """List transformers' modeling files with the attention interface, as module names below `transformers.models`."""
    root = Path(transformers.__file__).parent / "models"
    found = [path for path in root.glob("*/modeling_*.py") if DISPATCH in path.read_text(encoding="utf-8")]
    return sorted(f"{path.parent.name}.{path.stem}" for path in found)


def timm_models() -> list[str]:
    """List a small model of every family of timm, and those in `TIMM_MORE`."""
    import timm

    found = []
    for module in timm.list_modules():
        names = [name for name in timm.list_models(module=module) if not name.startswith("test_")]
        if names:
            found.append(min(names, key=lambda name: (_weight(name), len(name), name)))
    return [f"timm/{name}" for name in (*found, *TIMM_MORE)]


def _weight(name: str) -> int:
    sizes = ("atto", "femto", "pico", "nano", "xxs", "xxt", "tiny", "xs", "xt", "mini", "small", "light")
    return next((i for i, word in enumerate(sizes) if word in name), len(sizes))


def try_one(name: str) -> Result:
    """Try one architecture by its name in `modeling_files` or `timm_models`."""
    if name.startswith("timm/"):
        kind = name.removeprefix("timm/")
        return try_model(name, lambda: _timm_model(kind))
    return try_model(name.partition(".")[0] + _variant(name), lambda: build(name), example_inputs(name))


def _timm_model(kind: str) -> PreTrainedModel:
    """Build one of timm's models, of two layers where it takes a depth."""
    import timm

    arguments: dict[str, Any] = {"depth": 2, **TIMM_ARGUMENTS.get(kind, {})}
    try:
        model = timm.create_model(kind, num_classes=3, **arguments)
    except Exception:
        # By number of layers, where those differ in kind.
        arguments = {}
        model = timm.create_model(kind, num_classes=3)
    if kind in TIMM_SIZES:
        model.pretrained_cfg["input_size"] = TIMM_SIZES[kind]
    _calibrate(model)
    return wrap(open_gates(model.eval()), arguments)


def _calibrate(model: torch.nn.Module) -> None:
    """Let fresh batch normalisations see one batch, so that what goes through deep convolutions does not fade away."""
    norms = [one for one in model.modules() if isinstance(one, torch.nn.BatchNorm2d)]
    momenta = [one.momentum for one in norms]
    for one in norms:
        one.momentum = None
    if norms:
        torch.manual_seed(0)
        with torch.no_grad():
            model.train()(torch.randn(2, *model.pretrained_cfg["input_size"]))  # type: ignore[arg-type]
    for one, momentum in zip(norms, momenta, strict=True):
        one.momentum = momentum


def _variant(name: str) -> str:
    folder, _, module = name.partition(".")
    return "" if module == f"modeling_{folder}" else f" ({module.removeprefix('modeling_')})"


def tell(name: str, path: str) -> None:
    """Try an architecture, and write the result to a file; names of timm's models have a folder in them."""
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(json.dumps(try_one(name).to_dict()), encoding="utf-8")


def apart(work: Callable[[], Result], name: str, seconds: int) -> dict[str, Any]:
    """Run `work` in a forked process and return its result; a crash or too long a time is a failure too."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        # Of the processor's time, as others may use it too.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        torch.set_num_threads(1)
        try:
            os.write(write, json.dumps(work().to_dict()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if text:
        return dict(json.loads(text))
    return Result(name, status=FAILED, step="process", message=f"died, or took over {seconds} s").to_dict()


def sweep(names: list[str], seconds: int) -> Iterator[dict[str, Any]]:
    """Try architectures one after the other."""
    for name in names:
        yield apart(lambda name=name: try_one(name), name, seconds)  # type: ignore[misc]


def main() -> None:
    """Try what is asked for, and append results to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="JSON lines; what is in it already is not tried again")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th architecture, from the I-th")
    parser.add_argument("--only", nargs="*", default=[], help="names that begin with one of these")
    parser.add_argument("--timm", action="store_true", help="timm's families in place of transformers' files")
    parser.add_argument("--seconds", type=int, default=60, help="longest processor time for one")
    options = parser.parse_args()
    names = timm_models() if options.timm else modeling_files()
    if options.only:
        names = [name for name in names if name.startswith(tuple(options.only))]
    known = options.output.read_text(encoding="utf-8").splitlines() if options.output.exists() else []
    names = sorted(set(names) - {json.loads(line)["file"] for line in known}, key=names.index)
    number, of = map(int, options.part.split("/"))
    commit = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    ).stdout.strip()
    # What all need is imported before the first fork.
    try_one("bert.modeling_bert")
    gc.freeze()
    with options.output.open("a", encoding="utf-8") as file:
        for name, result in zip(names[number - 1 :: of], sweep(names[number - 1 :: of], options.seconds), strict=True):
            print(json.dumps({"file": name, "commit": commit, **result}), file=file, flush=True)


if __name__ == "__main__":
    main()
