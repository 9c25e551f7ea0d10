"""Crashes and leftovers: what is refused is refused before the first step; a save that fails keeps the training."""

import errno
import os
import resource
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from support import forks
from support.command_lines import VERBS, line_of, without
from support.tiny import converted, inputs_of, outputs
from transformers import PreTrainedModel

import linearize.attention.native as native
from linearize.checkpoint import output
from linearize.checkpoint.output import atomic_folder, check_room, claim, clear_leftovers
from linearize.core.errors import CheckpointError
from linearize.training.states import RunState, StateFolder


def same_weights(one, two):
    one, two = (load_file(folder / "model.safetensors") for folder in (one, two))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# Item 16.
def test_without_a_home_the_native_op_is_not_built(monkeypatch, cli):
    def nobody(number):
        raise KeyError(number)

    model = converted("bert")
    expected = outputs(model, inputs_of(model))
    for name in ("HOME", "XDG_CACHE_HOME", "LINEARIZE_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    native.forget()
    try:
        assert native.engine() is None
        found = outputs(model, inputs_of(model))
        code, _, err = cli(["native"])
    finally:
        native.forget()
    assert all(map(torch.equal, expected, found))
    assert code == 2 and "set HOME or XDG_CACHE_HOME" in err and len(err.splitlines()) == 1


# Item 17.
BAD_NAMES = {
    "long": "x" * 245,
    "bytes": os.fsdecode(b"out\xff"),
    "zero": "out\0put",
    "dangling": "dangling",
    "link": "link",
    "file": "file",
    "below a file": "file/out",
    "pipe": "pipe",
    "long path": "/".join(["y" * 200] * 25),
    "root": "/",
}


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("verb", VERBS)
def test_a_name_that_no_output_can_have_is_refused_first(verb, name, models, tmp_path, monkeypatch, capsys):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    # Whatever is slow comes later.
    monkeypatch.setattr(
        PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("slow work before the refusal")
    )
    out = BAD_NAMES[name] if name == "root" else tmp_path / BAD_NAMES[name]
    from linearize.cli import main

    line = line_of(verb, models, out)
    assert main(line) == 2
    err = capsys.readouterr().err
    assert "output" in err and len(err.splitlines()) == 1, err
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "file").read_text() == "mine"


def test_the_longest_name_that_is_taken_works(models, tmp_path, cli):
    out = tmp_path / ("x" * (256 - len(output.spare_name(Path("x")).name)))
    assert cli(line_of("convert", models, out, "--save-every", 2))[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def with_small_files(words):
    from linearize.cli import main

    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
    sys.exit(main(words))


@pytest.mark.parametrize("verb", ["convert", pytest.param("finetune", marks=pytest.mark.slow)])
def test_a_file_too_large_is_seen_before_the_first_step(verb, models, tmp_path):
    done = forks.run(with_small_files, line_of(verb, models, tmp_path / "out"))
    assert done.returncode == 2, done.stderr
    assert "of the result cannot be written to" in done.stderr and "File too large" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and "step 1" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_seen_before_the_first_step(models, tmp_path, monkeypatch, cli):
    def full(handle, start, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for verb in ("convert", "distill", "align", "finetune"):
        code, text, err = cli(line_of(verb, models, tmp_path / "out"))
        assert code == 2 and "cannot be written to" in err and "No space left on device" in err
        assert "step 1" not in text and list(tmp_path.iterdir()) == []


def test_room_is_asked_for_in_files_of_the_size_that_is_written(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "posix_fallocate", lambda handle, start, size: sizes.append(size))
    check_room(tmp_path / "out", 2 * output.SHARD + 5)
    assert sizes == [output.SHARD, output.SHARD, 5] and list(tmp_path.iterdir()) == []


def broken_save(monkeypatch, *, states=False):
    """Have the disk full when the model is written, and the states beside the output too."""

    def full(*_args, **_options):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    if states:
        from linearize.training.states import StateFolder

        real = StateFolder.save

        def save(self, step, state):
            if "linearize-" in str(self.folder):
                return real(self, step, state)
            raise CheckpointError("could not write a state")

        monkeypatch.setattr(StateFolder, "save", save)


@pytest.mark.sampled("values")
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("verb", ["convert", "distill", "align"])
def test_a_save_that_fails_keeps_what_was_trained(verb, states, models, tmp_path, cli, monkeypatch):
    """The command that is printed saves it, without training again."""
    assert cli(line_of(verb, models, tmp_path / "whole"))[0] == 0
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "elsewhere").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        broken_save(patch, states=states)
        code, _, err = cli(line_of(verb, models, tmp_path / "out"))
    assert code == 2 and len(err.splitlines()) == 1 and not (tmp_path / "out").exists()
    assert "No space left on device" in err and "the trained state is kept in" in err
    words = shlex.split(err.split("save it with: linearize ")[1])
    kept = Path(words[words.index("--output") + 1])
    assert (kept == tmp_path / "out") is not states and words.count("--output") == 1
    with pytest.MonkeyPatch.context() as patch:
        for step in ("stage_one.observer.KernelTrainer.step", "alignment.trainer.AlignTrainer.training_step"):
            patch.setattr(f"linearize.training.{step}", lambda *_: pytest.fail("trained again"))
        code, _, err = cli(words)
    assert code == 0, err
    assert same_weights(kept, tmp_path / "whole")
    assert not list(kept.parent.glob(f"{kept.name}.*"))


def test_a_save_that_fails_after_stage_two_keeps_the_checkpoints(models, tmp_path, cli):
    assert cli(line_of("finetune", models, tmp_path / "whole"))[0] == 0
    from transformers import Trainer

    with pytest.MonkeyPatch.context() as patch:

        def full(*_args, **_options):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr("linearize.checkpoint.output._sync", full)
        code, _, err = cli(line_of("finetune", models, tmp_path / "out"))
    assert code == 2 and f"the trained state is kept in '{tmp_path / 'out'}.training'" in err
    words = shlex.split(err.split("save it with: linearize ")[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "training_step", lambda *_, **__: pytest.fail("trained again"))
        code, _, err = cli(words)
    assert code == 0, err
    assert same_weights(tmp_path / "out", tmp_path / "whole") and not (tmp_path / "out.training").exists()


# Item 18.
def test_what_a_killed_save_left_is_cleared_by_the_next(models, tmp_path, cli):
    for name in (".new-out-01234567", ".new-out-x", ".new-out-and-more-01234567", ".new-other-01234567"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".new-out-89abcdef").write_bytes(b"a probe")
    (tmp_path / ".lock-out").write_text(f"{output.LOCKED_BY}999999999\n")
    assert cli(line_of("init", models, tmp_path / "out"))[0] == 0
    left = {".new-out-x", ".new-out-and-more-01234567", ".new-other-01234567", "out"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_locks_of_killed_processes_are_cleared_and_others_left(tmp_path):
    """Beside a folder that is whole, and beside those inside it."""
    run, cells = tmp_path / "run", tmp_path / "run" / "cells"
    (cells / ".new-one-01234567").mkdir(parents=True)
    for stale in (tmp_path / ".lock-run", cells / ".lock-one"):
        stale.write_text(f"{output.LOCKED_BY}999999999\n")
    with claim(cells / "two"):
        clear_leftovers(run)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        assert [path.name for path in cells.iterdir()] == [".lock-two"]
    assert not any(cells.iterdir())


def test_what_an_overwrite_was_about_to_replace_is_put_back(models, tmp_path, cli):
    assert cli(line_of("init", models, tmp_path / "out"))[0] == 0
    (tmp_path / "out").rename(tmp_path / ".old-out-01234567")
    code, _, err = cli(without(line_of("init", models, tmp_path / "out"), "--overwrite"))
    assert code == 2 and "exists and is not empty" in err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    # Where the new one has the name, the old one is no longer wanted.
    (tmp_path / ".old-out-01234567").mkdir()
    assert cli(line_of("init", models, tmp_path / "out"))[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_ctrl_c_between_the_renames_loses_nothing(at, tmp_path, monkeypatch):
    def write(text):
        with atomic_folder(tmp_path / "out", overwrite=True) as fresh:
            (fresh / "a").write_text(text)

    write("old")
    real, seen = Path.rename, []

    def rename(self, target):
        seen.append(self)
        if len(seen) == at:
            raise KeyboardInterrupt
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            write("new")
    assert (tmp_path / "out" / "a").read_text() == ("new" if at == 3 else "old")
    with claim(tmp_path / "out", overwrite=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Item 19.
def test_changes_may_follow_options(models, tmp_path, cli):
    line = ["run", models / "recipe.yaml", "--output", tmp_path / "run", "kernels=[softmax]", "--dry-run", "device=cpu"]
    code, text, err = cli(line)
    assert code == 0, err
    assert "softmax-mine-s0" in text and "hedgehog" not in text
    code, _, err = cli([*line, "--outptu", "x"])
    assert code == 2 and "Did you mean --output?" in err
    code, _, err = cli(["run", "--output", tmp_path / "run"])
    assert code == 2 and "required: RECIPE" in err


def test_a_folder_is_removed_whole_or_not_at_all(tmp_path, monkeypatch):
    """A kill while states are removed leaves none that a resume would stumble over."""
    states = StateFolder(tmp_path / "out.stage1", 2)
    for step in (2, 4):
        states.save(step, RunState({"step": step}, {"a": torch.ones(1)}))

    def cut(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("linearize.checkpoint.ownership.shutil", SimpleNamespace(rmtree=cut))
        with pytest.raises(KeyboardInterrupt):
            states.save(6, RunState({"step": 6}, {"a": torch.ones(1)}))
        assert states.steps() == [4, 6] and states.load().step == 6
        with pytest.raises(KeyboardInterrupt):
            states.remove()
    assert states.steps() == [4, 6] and states.load().step == 6
    states.remove()
    assert not (tmp_path / "out.stage1").exists()
