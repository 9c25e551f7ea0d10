"""Killed and resumed runs end with the very same kernels."""

import json
import os
import random
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from support import forks
from support.children import resumed
from support.training import Fixed, batches, sharp

from linearize.core.errors import CheckpointError, ConfigError
from linearize.training.stage_one import DistillConfig
from linearize.training.stage_one.loop import distill
from linearize.training.states import StateFolder


class Stop(Exception):
    """What ends a run in the middle."""


def run(folder, *, stop_at=None, resume=False, name="bert", **options):
    model = sharp(name)

    def on_step(report):
        if report.step == stop_at:
            raise Stop

    values = {"steps": 12, "eval_every": 3, "save_every": 2, "query_sample": 5, **options}
    config = DistillConfig(**values, folder=None if folder is None else str(folder), resume=resume)
    try:
        result = distill(model, Fixed(batches(model)), config, on_step=on_step)
    except Stop:
        return None
    return {k: v.clone() for k, v in model.state_dict().items()}, result


@pytest.mark.sampled("values")
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation": 2}, {"patience": 1}])
@pytest.mark.parametrize("stop_at", [1, 5, 9, 12])
def test_resumed_equals_uninterrupted_to_the_bit(stop_at, options, tmp_path):
    whole, result = run(tmp_path / "whole", **options)
    assert run(tmp_path / "cut", stop_at=stop_at, **options) is None or result.steps < stop_at
    resumed, again = run(tmp_path / "cut", resume=True, **options)
    assert all(torch.equal(whole[k], resumed[k]) for k in whole)
    assert (again.steps, again.best_step, again.held_out) == (result.steps, result.best_step, result.held_out)
    assert [r.losses for r in again.history] == [r.losses for r in result.history]


def test_a_state_of_an_older_version_goes_on(tmp_path):
    """Those counted evaluations under another name."""
    whole, _ = run(tmp_path / "whole")
    assert run(tmp_path / "cut", stop_at=5) is None
    for file in (tmp_path / "cut").glob("step-*/state.json"):
        record = json.loads(file.read_text())
        record["progress"]["looks"] = record["progress"].pop("rises")
        file.write_text(json.dumps(record))
    resumed, _ = run(tmp_path / "cut", resume=True)
    assert all(torch.equal(whole[k], resumed[k]) for k in whole)


def test_only_the_last_states_are_kept(tmp_path):
    run(tmp_path, keep=3)
    assert StateFolder(tmp_path, 3).steps() == [8, 10, 12]
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


def test_resume_with_other_options_is_refused(tmp_path):
    run(tmp_path, stop_at=4)
    with pytest.raises(ConfigError, match=r"started with learning_rate=None, now it is 0\.5"):
        run(tmp_path, resume=True, learning_rate=0.5)


def test_resume_without_a_state_starts_from_the_beginning(tmp_path):
    whole, _ = run(None, save_every=None)
    fresh, _ = run(tmp_path / "empty", resume=True)
    assert all(torch.equal(whole[k], fresh[k]) for k in whole)


def test_a_broken_state_is_an_error_that_says_what_to_do(tmp_path):
    run(tmp_path, stop_at=4)
    (tmp_path / "step-2" / "state.safetensors").write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match="remove that folder to resume from the one before"):
        run(tmp_path, resume=True)


def child(states, result):
    """Start one, and return it once the model is made and training begins."""
    ready = result.with_suffix(".ready")
    ready.unlink(missing_ok=True)
    process = forks.start(resumed.main, str(states), str(result), said=result.with_suffix(".said"))
    while process.is_alive() and not ready.exists():
        time.sleep(0.005)
    return process


@pytest.mark.slow
def test_sigkill_at_random_moments_never_costs_a_bit(tmp_path):
    """Kills runs at random moments, again and again; they always resume, and end like an uninterrupted one."""
    first = child(tmp_path / "whole", tmp_path / "whole.safetensors")
    first.join()
    assert first.exitcode == 0, (tmp_path / "whole.said" / "stderr").read_text()
    whole, ended = load_file(tmp_path / "whole.safetensors"), tmp_path / "cut.safetensors"
    dice = random.Random(int(os.environ.get("LINEARIZE_KILL_SEED", "0")))
    kills = int(os.environ.get("LINEARIZE_KILLS", "4"))
    while kills or not ended.exists():
        if ended.exists():
            # A run came to its end between two kills: the next one starts from nothing.
            same_tensors(whole, load_file(ended))
            ended.unlink()
            shutil.rmtree(tmp_path / "cut")
        process = child(tmp_path / "cut", ended)
        if not kills:
            process.join()
            assert process.exitcode == 0
            break
        time.sleep(dice.uniform(0.05, 0.8))
        if process.is_alive():
            process.kill()
            kills -= 1
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
    same_tensors(whole, load_file(ended))


def same_tensors(one, two):
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
