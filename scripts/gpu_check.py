"""Check and measure linearize on a CUDA device: `make gpu`.

    python scripts/gpu_check.py --output gpu-results

Runs the steps of `plan` one after the other, each as a separate command. The output folder then holds the JSON that
each step printed, `tests.json`, and `summary.json`: device, versions, and every step's exit code and seconds. If a step
fails, the next ones still run, and the exit code is 1. The time limit for all steps is ten minutes; later steps are
not started, and the summary lists them. Without a CUDA device the plan is printed, nothing is run, and the exit code
is 0.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

CHECKOUT = Path(__file__).resolve().parent.parent
LENGTHS = "512,1024,2048,4096,8192,16384,32768"
MINUTES = 10.0
"""Time limit of the whole plan."""

COMMAND_LINE = ("-c", "import sys; from linearize.cli import main; sys.exit(main(sys.argv[1:]))")


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: base name of its files in the output folder.
        what: description.
        words: arguments for Python.
        limit: seconds after which it is killed.
    """

    name: str
    what: str
    words: tuple[str, ...]
    limit: float = 120.0

    @property
    def line(self) -> str:
        """The command in readable form."""
        if self.words[:2] == COMMAND_LINE:
            return shlex.join(["linearize", *self.words[2:]])
        return shlex.join(["python", *self.words])


def plan(output: Path, *, model: str | None) -> list[Step]:
    """Return the steps.

    Args:
        output: folder that they write to.
        model: folder of the demo's MiniLM, or None if it is not installed.
    """
    junit = output / "tests.xml"
    # -v names the tests as they end, also if the time is up before the summary.
    tests = ("-m", "pytest", "tests/gpu", "-m", "gpu", "-v", f"--junitxml={junit}", "--durations=10", "--timeout=120")
    steps = [Step("tests", "ops, kernels and checkpoints on the device, fp32 and bf16", tests, 300.0)]
    if model is not None:
        steps.append(_conversion(output, model))
    suites = {
        "attention-bf16": ["--dtype", "bfloat16"],
        "attention-fp32": [],
        "causal-bf16": ["--causal", "--dtype", "bfloat16"],
        "causal-fp32": ["--causal"],
        "backward-bf16": ["--backward", "--dtype", "bfloat16"],
        "causal-backward-bf16": ["--causal", "--backward", "--dtype", "bfloat16"],
        "window-bf16": ["--window", "128", "--sinks", "4", "--dtype", "bfloat16"],
        "window-causal-bf16": ["--window", "128", "--sinks", "4", "--causal", "--dtype", "bfloat16"],
    }
    for name, options in suites.items():
        steps.append(_bench(name, [*COMMAND_LINE, "bench", *options]))
    steps.append(_bench("decode-bf16", ["-m", "benchmarks.attentions", "decode", "--dtype", "bfloat16"]))
    return steps


def _bench(name: str, words: Sequence[str]) -> Step:
    how = ("--device", "cuda", "--kernel", "hedgehog", "--kernel", "flexformer_n")
    what = "compared with SDPA, 512 to 32,768 tokens"
    return Step(f"bench-{name}", what, (*words, *how, "--lengths", LENGTHS, "--repeats", "20", "--json"))


def _conversion(output: Path, model: str) -> Step:
    words = ["convert", model, "--kernel", "hedgehog", "--max-length", "8192", "--distill-steps", "60"]
    words += ["--distill-length", "128", "--align-steps", "20", "--batch-size", "16", "--overwrite"]
    words += ["--device", "cuda", "--json", "--output", str(output / "minilm-hedgehog")]
    return Step("convert", "MiniLM: stage one and alignment on the device", (*COMMAND_LINE, *words), 180.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the plan, or print it if there is no device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="gpu-results", metavar="DIR", help="folder for the JSON (gpu-results)")
    output = Path(parser.parse_args(argv).output).absolute()
    steps = plan(output, model=demo_model())
    device = cuda_device()
    if device is None:
        print(f"No CUDA device here. On a machine with one, this would run, within {MINUTES:.0f} minutes:")
        for step in steps:
            print(f"  {step.name}: {step.what}\n    {step.line}")
        print(f"and write the JSON of each to {output}. Nothing was run.")
        return 0
    output.mkdir(parents=True, exist_ok=True)
    results = run_all(steps, output)
    (output / "summary.json").write_text(json.dumps({"device": device, "steps": results}, indent=2) + "\n")
    failed = [result["name"] for result in results if result["code"] != 0]
    print(f"{len(results) - len(failed)} of {len(results)} steps succeeded; figures in {output}")
    if failed:
        print(f"failed or not started: {', '.join(failed)}; see the .log files there", file=sys.stderr)
    return 1 if failed else 0


def run_all(steps: Sequence[Step], output: Path, minutes: float = MINUTES) -> list[dict[str, Any]]:
    """Run steps in order until the time limit; later steps get no exit code."""
    start, results = time.monotonic(), []
    for number, step in enumerate(steps, 1):
        left = minutes * 60 - (time.monotonic() - start)
        print(f"[{number}/{len(steps)}] {step.name}: {step.what}", flush=True)
        began = time.monotonic()
        code = run_step(step, output, min(left, step.limit)) if left > 0 else None
        seconds = time.monotonic() - began
        outcome = {0: "succeeded", None: "not started, the time is up"}.get(code, f"exit code {code}")
        print(f"    {outcome}, {seconds:.0f} s", flush=True)
        results.append({"name": step.name, "line": step.line, "code": code, "seconds": round(seconds, 1)})
    return results


def run_step(step: Step, output: Path, limit: float) -> int:
    """Run one step and return its exit code (124: timeout); JSON on stdout goes to NAME.json, all else to NAME.log."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *step.words],
            cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=limit, check=False,
        )  # fmt: skip
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, out, err = 124, _text(late.stdout), _text(late.stderr)
    try:
        figures = json.loads(out)
        (output / f"{step.name}.json").write_text(json.dumps(figures, indent=2) + "\n")
        out = ""
    except ValueError:
        pass
    (output / f"{step.name}.log").write_text(out + err)
    junit = output / f"{step.name}.xml"
    if junit.is_file():
        (output / f"{step.name}.json").write_text(json.dumps(summary_of_tests(junit), indent=2) + "\n")
    return code


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def summary_of_tests(junit: Path) -> dict[str, Any]:
    """Return the counts of pytest's results, the failed tests, and the reasons for skipping tests."""
    root = ElementTree.parse(junit).getroot()
    cases = list(root.iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    reasons = sorted({case.find("skipped").get("message", "") for case in skipped})  # type: ignore[union-attr]
    return {
        "tests": len(cases),
        "passed": len(cases) - len(bad) - len(skipped),
        "failed": [f"{case.get('classname')}.{case.get('name')}" for case in bad],
        "skipped": len(skipped),
        "skipped_because": reasons,
        "seconds": sum(float(case.get("time", 0)) for case in cases),
    }


def demo_model() -> str | None:
    """Return the folder of the demo's MiniLM, or None."""
    from linearize.core.errors import CheckpointError
    from linearize.jobs.demo import minilm_folder

    try:
        return str(minilm_folder())
    except CheckpointError:
        return None


def cuda_device() -> Mapping[str, Any] | None:
    """Return a description of the CUDA device, or None."""
    import torch
    import transformers

    if not torch.cuda.is_available():
        return None
    from linearize.attention.backends.triton_calls import absence

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "triton": absence() or importlib.metadata.version("triton"),
    }


if __name__ == "__main__":
    sys.exit(main())
