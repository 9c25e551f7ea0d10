"""What `make gpu` would run: each step is a command that exists; the runner continues after failures and keeps time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from support.scripts import SCRIPTS, script

from benchmarks import attentions
from linearize.cli.main import build_parser

check = script("gpu_check")


def test_the_plan_covers_what_is_promised(tmp_path):
    steps = {step.name: step for step in check.plan(tmp_path, model="minilm")}
    assert list(steps)[:2] == ["tests", "convert"] and "convert" not in [
        s.name for s in check.plan(tmp_path, model=None)
    ]
    benches = [step for name, step in steps.items() if name.startswith("bench-")]
    decoding = attentions.parse(list(benches.pop().words[2:]))
    assert (decoding.suite, decoding.device, decoding.kernel) == ("decode", "cuda", ["hedgehog", "flexformer_n"])
    asked = [vars(build_parser("bench").parse_args(step.words[3:])) for step in benches]
    assert {args["device"] for args in asked} == {"cuda"}
    assert {args["lengths"] for args in asked} == {"512,1024,2048,4096,8192,16384,32768"}
    forward = [args for args in asked if not args.get("backward")]
    assert {(bool(args.get("causal")), args.get("dtype") or "float32") for args in forward} == {
        (False, "float32"), (False, "bfloat16"), (True, "float32"), (True, "bfloat16"),
    }  # fmt: skip
    assert any(args.get("backward") for args in asked)
    convert = build_parser("convert").parse_args(steps["convert"].words[3:])
    assert convert.device == "cuda" and int(convert.align_steps) > 0
    assert steps["tests"].words[:5] == ("-m", "pytest", "tests/gpu", "-m", "gpu")
    assert (Path(check.CHECKOUT) / "tests" / "gpu").is_dir() and SCRIPTS == check.CHECKOUT / "scripts"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_it_says_what_it_would_do(tmp_path, capsys):
    assert check.main(["--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "No CUDA device" in said and "Nothing was run" in said and not (tmp_path / "out").exists()
    for step in check.plan(tmp_path / "out", model=None):
        assert step.line in said


def step(name, code, *arguments):
    return check.Step(name, "a test", ("-c", code, *arguments))


def test_the_runner_continues_after_a_failure(tmp_path, capsys):
    steps = [
        step("good", "print('{\"a\": 1}')"),
        step("bad", "import sys; print('text'); sys.exit('no')"),
        dataclasses.replace(step("slow", "import time; time.sleep(60)"), limit=0.3),
        step("last", "print('[2]')"),
    ]
    found = {result["name"]: result["code"] for result in check.run_all(steps, tmp_path)}
    assert found == {"good": 0, "bad": 1, "slow": 124, "last": 0}
    assert json.loads((tmp_path / "good.json").read_text()) == {"a": 1}
    assert json.loads((tmp_path / "last.json").read_text()) == [2]
    assert (tmp_path / "bad.log").read_text() == "text\nno\n" and not (tmp_path / "bad.json").exists()
    assert [result["code"] for result in check.run_all(steps[:1], tmp_path, minutes=0)] == [None]
    assert "not started" in capsys.readouterr().out


def test_results_of_pytest_become_json(tmp_path):
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="b" time="1.5"/><testcase classname="a" name="c" time="0">'
        '<failure message="x"/></testcase><testcase classname="a" name="d" time="0.5"><skipped message="no device"/>'
        "</testcase></testsuite></testsuites>"
    )
    found = check.summary_of_tests(tmp_path / "tests.xml")
    assert found == {
        "tests": 3, "passed": 1, "failed": ["a.c"], "skipped": 1, "skipped_because": ["no device"], "seconds": 2.0,
    }  # fmt: skip


def test_a_bench_step_runs_on_the_cpu_as_well(monkeypatch, capsys):
    """The same line with another device and other sizes, in this process."""
    from linearize.cli import main

    words = check.plan(Path("out"), model=None)[-2].words[2:]
    small = [
        "--device",
        "cpu",
        "--lengths",
        "16,32",
        "--heads",
        "2",
        "--head-dim",
        "8",
        "--repeats",
        "1",
    ]
    assert main([*words, *small, "--no-memory"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["tokens"] for row in rows] == [16, 32] * 2 and all(row["speedup"] > 0 for row in rows)
