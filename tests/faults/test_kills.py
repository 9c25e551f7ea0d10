"""kill -9 at random moments over the verbs that write: nothing is ever half there, and the next run ends unharmed.

The moments follow from a seed: LINEARIZE_KILL_SEED. Six kills run with the other tests, more than fifty in `make slow`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time

import matplotlib
import pytest
import torch
from safetensors.torch import load_file
from support.command_lines import line_of, run_words
from support.fake_hub import TOKEN, FakeHub
from support.forks import context

from linearize.checkpoint.ownership import check_ours

KILLS = {"convert": 4, "report": 2}
MANY = {"convert": 10, "distill": 6, "align": 6, "finetune": 10, "run": 8, "report": 5, "push": 5, "native": 4}
MORE = {
    "convert": ["--save-every", 2], "distill": ["--save-every", 2], "align": ["--save-every", 1],
}  # fmt: skip
RESUMES = ("convert", "distill", "align", "finetune", "run")


def lines_of(verb, models, out):
    """Return the first line, and the line with which one goes on."""
    if verb == "push":
        words = ["push", str(models / "hedgehog"), "alice/model"]
        return words, words
    if verb == "native":
        return ["native", "--build"], ["native", "--build"]
    words = line_of(verb, models, out, *MORE.get(verb, []))
    return words, [*words, "--resume"] if verb in RESUMES else words


class Program:
    """A program of its own, with the face of a `multiprocessing.Process`: huggingface_hub reads its settings once."""

    def __init__(self, words, environment, said):
        code = "import sys; from linearize.cli import main; sys.exit(main(sys.argv[1:]))"
        with said.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *words],
                env=os.environ | environment,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
        self.kill = self.process.kill

    def is_alive(self):
        return self.process.poll() is None

    def join(self):
        self.process.wait()

    @property
    def exitcode(self):
        return self.process.returncode


def start(words, environment, said):
    if words[0] == "push":
        return Program(words, environment, said)
    child = context.Process(target=run_words, args=(words, environment, str(said)))
    child.start()
    return child


def ends(words, environment, said):
    """Run to the end and return the seconds that it took."""
    begin = time.monotonic()
    child = start(words, environment, said)
    child.join()
    assert child.exitcode == 0, (words, said.read_text())
    return time.monotonic() - begin


def whole(verb, out, models):
    """Whatever has the output's name is complete."""
    if verb in ("push", "native") or not out.exists():
        return
    if verb == "report":
        json.loads((out / "report.json").read_text())
        assert (out / "index.html").read_text().rstrip().endswith("</html>")
        check_ours(out, "out")
    elif verb == "run":
        results = out / "results.jsonl"
        complete = results.exists() and len(results.read_text().splitlines()) == 2
        for stage in out.glob("*/*/stage.json"):
            json.loads(stage.read_text())
            # A finished run keeps no weights that only led to others.
            if not (complete and stage.parent.parent.name == "distilled"):
                load_file(stage.parent / "model.safetensors")
        assert (out / "recipe.yaml").is_file()
    else:
        load_file(out / "model.safetensors")
        check_ours(out, "out")


def same(verb, one, two):
    """Two results are the same, to the bit where they are weights."""
    if verb == "report":
        first, second = (json.loads((folder / "report.json").read_text())["fidelity"] for folder in (one, two))
        assert first == second
        return
    if verb == "run":
        rows = [(folder / "results.jsonl").read_text().splitlines() for folder in (one, two)]
        first, second = ({row["cell"]: row["metrics"] for row in map(json.loads, lines)} for lines in rows)
        assert first == second and len(first) == 2
        one, two = (folder / "cells" / "hedgehog-mine-s0" for folder in (one, two))
    first, second = (load_file(folder / "model.safetensors") for folder in (one, two))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def kill_again_and_again(verb, kills, models, tmp_path):
    dice = random.Random(f"{os.environ.get('LINEARIZE_KILL_SEED', '0')} {verb} {kills}")
    hub = FakeHub()
    # Matplotlib keeps its list of fonts: to make one takes minutes on a busy machine.
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "MPLCONFIGDIR": matplotlib.get_cachedir()}
    if verb == "push":
        environment |= {"HF_ENDPOINT": hub.start(), "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(tmp_path / "home")}
    out, there, said = tmp_path / "work" / "out", tmp_path / "whole", tmp_path / "stderr"
    (out.parent / "mine").mkdir(parents=True)
    (out.parent / "mine" / "thesis.txt").write_text("years of work")
    try:
        # The first process of all imports everything, which no later one does.
        ends(["kernels"], environment, said)
        seconds = ends(lines_of(verb, models, there)[0], environment, said)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        first, again = lines_of(verb, models, out)
        words = first
        done = 0
        while done < kills:
            child = start(words, environment, said)
            time.sleep(dice.uniform(0.05, 0.95) * seconds)
            if child.is_alive():
                child.kill()
                done += 1
            child.join()
            assert child.exitcode in (0, -9), (words, child.exitcode, said.read_text())
            whole(verb, out, models)
            assert (out.parent / "mine" / "thesis.txt").read_text() == "years of work"
            words = again
            if child.exitcode == 0:
                # It came to its end before the kill: the next one starts from nothing.
                for path in out.parent.glob("out*"):
                    shutil.rmtree(path)
                words = first
        ends(words, environment, said)
        if verb == "push":
            assert hub.files["model.safetensors"] == (models / "hedgehog" / "model.safetensors").read_bytes()
            assert hub.files["config.json"] == (models / "hedgehog" / "config.json").read_bytes()
        elif verb == "native":
            assert list((tmp_path / "cache" / "linearize").glob("native-*.so"))
        else:
            same(verb, there, out)
            assert sorted(path.name for path in out.parent.iterdir()) == ["mine", "out"]
    finally:
        if verb == "push":
            hub.stop()


def native_op(verb):
    from linearize.attention.native.build import compiler

    if verb == "native" and compiler() is None:
        pytest.skip("no C compiler here")


@pytest.mark.parametrize("verb", KILLS)
def test_a_kill_loses_nothing(verb, models, tmp_path):
    native_op(verb)
    kill_again_and_again(verb, KILLS[verb], models, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("verb", MANY)
def test_many_kills_lose_nothing(verb, models, tmp_path):
    native_op(verb)
    kill_again_and_again(verb, MANY[verb], models, tmp_path)


def test_there_are_enough_kills():
    assert sum(KILLS.values()) >= 6 and sum(MANY.values()) >= 50
