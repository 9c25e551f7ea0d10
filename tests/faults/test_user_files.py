"""Nothing of the user's is lost: what may be replaced, what is refused first, and two writers at once."""

import contextlib
import json
import os
import shutil

import pytest
import torch
from support.command_lines import changed, line_of, run_words, without
from support.forks import context

from linearize.checkpoint.loading import load_model
from linearize.checkpoint.output import atomic_folder, check_target, claim, clear_leftovers
from linearize.checkpoint.ownership import MARKER, check_links, check_ours, mark
from linearize.core.errors import CheckpointError
from linearize.training.stage_two.save import check_work, write_started
from linearize.training.states import RunState, StateFolder

STARTED = {"data contents": "0123"}
"""What a run of ours was started with."""


def tree(folder):
    """Return every file below a folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def docs(tmp_path):
    """A folder of the user's own."""
    folder = tmp_path / "docs"
    (folder / "old").mkdir(parents=True)
    (folder / "thesis.txt").write_text("years of work")
    (folder / "old" / "draft.txt").write_text("more of it")
    return folder


# Item 1.
def test_a_run_is_not_resumed_in_a_folder_that_holds_none(models, docs, cli):
    before = tree(docs)
    code, _, err = cli(line_of("run", models, docs, "--resume"))
    assert code == 2 and "holds no run (it has no recipe.yaml)" in err and len(err.splitlines()) == 1
    assert tree(docs) == before


# Item 2.
@pytest.mark.parametrize("verb", ["convert", "distill", "align", "finetune", "init", "report", "compare", "demo"])
def test_overwrite_replaces_no_folder_of_somebody_else(verb, models, docs, cli):
    before = tree(docs)
    code, _, err = cli(line_of(verb, models, docs))
    assert code == 2 and len(err.splitlines()) == 1
    assert "was not written by linearize (it holds 'old/draft.txt')" in err
    assert tree(docs) == before


def test_overwrite_replaces_ours_but_not_with_a_strangers_file_in_it(models, tmp_path, cli):
    out = tmp_path / "out"
    for _ in range(2):
        assert cli(line_of("convert", models, out))[0] == 0
    (out / "notes.txt").write_text("mine")
    before = tree(out)
    code, _, err = cli(line_of("convert", models, out))
    assert code == 2 and "holds 'notes.txt', which linearize did not write" in err
    assert tree(out) == before


def web_page(folder):
    (folder / "images").mkdir()
    for name in ("index.html", "report.json", "images/photo.png"):
        (folder / name).write_text("{}")


def old_marker(folder):
    (folder / "thesis.txt").write_text("years of work")
    (folder / MARKER).write_text(json.dumps({"written_by": "linearize", "files": ["thesis.txt"]}))


def converted_by_hand(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "linearize", "linearize": {}}))
    (folder / "README.md").write_text("years of work")


def states_of_another_app(folder):
    (folder / "state.json").write_text('{"step": 3}')
    (folder / "state.safetensors").write_bytes(b"weights")


def comparison(folder):
    (folder / "comparison.json").write_text("{}")


@pytest.mark.parametrize("make", [web_page, old_marker, converted_by_hand, states_of_another_app, comparison])
def test_a_folder_with_names_like_ours_is_the_users(make, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    make(folder)
    before = tree(folder)
    with pytest.raises(CheckpointError, match="so --overwrite does not replace it"), claim(folder, overwrite=True):
        pass
    assert tree(folder) == before


CHANGES = {
    "a new file": lambda folder: (folder / "my.csv").write_text("1"),
    "a file in a folder below": lambda folder: (folder / "b" / "my.csv").write_text("1"),
    "a longer text": lambda folder: (folder / "a").write_text("aaa"),
    "a link in a file's place": lambda folder: ((folder / "a").unlink(), (folder / "a").symlink_to("b/c")),
    "a link": lambda folder: (folder / "link").symlink_to("a"),
}


@pytest.mark.parametrize("change", [*CHANGES, None])
def test_what_is_not_on_the_list_stays(change, tmp_path):
    with atomic_folder(tmp_path / "out") as fresh:
        (fresh / "b").mkdir()
        for name in ("a", "b/c"):
            (fresh / name).write_text("aa")
    # A file that the user removed is no loss.
    (tmp_path / "out" / "b" / "c").unlink()
    if change is None:
        check_ours(tmp_path / "out", "out")
        return
    CHANGES[change](tmp_path / "out")
    with pytest.raises(CheckpointError, match="which linearize did not write, or which has changed since"):
        check_ours(tmp_path / "out", "out")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"written_by": "linearize", "files": 3}', "[" * 100_000, "\xff"])
def test_a_damaged_marker_says_nothing(text, docs):
    (docs / MARKER).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match="so --overwrite does not replace it"):
        check_ours(docs, "docs")


@pytest.mark.parametrize("where", [".", "..", "", "/", "~", "sub/..", "link/.."])
def test_places_that_no_output_may_take(where, tmp_path, monkeypatch):
    here = tmp_path / "home" / "here"
    (here / "sub").mkdir(parents=True)
    (here / "link").symlink_to(here / "sub")
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    given = str(tmp_path / "home") if where == "~" else where
    with pytest.raises(CheckpointError, match=r"root of the file system|the current folder|the home folder"):
        check_target(given, overwrite=True)


# Item 3.
@pytest.mark.parametrize("name", ["M", "M/", "./M", "link", "link/", "M/../M", "up/M", "."])
def test_the_model_itself_is_no_output(name, models, tmp_path, monkeypatch, cli):
    original = tmp_path / "M"
    original.mkdir()
    for file in (models / "bert").iterdir():
        (original / file.name).write_bytes(file.read_bytes())
    (tmp_path / "link").symlink_to(original)
    (tmp_path / "up").symlink_to(tmp_path)
    # Even if it were a folder that linearize wrote.
    mark(original)
    monkeypatch.chdir(original if name == "." else tmp_path)
    before = tree(original)
    line = ["convert", original, "--distill-steps", 0, "--output", name, "--overwrite", "--device", "cpu"]
    code, _, err = cli(line)
    assert code == 2 and len(err.splitlines()) == 1
    assert "which is read" in err or "is a link to" in err
    assert tree(original) == before


def test_a_folder_above_the_model_or_the_data_is_no_output(models, tmp_path, cli):
    for kind in ("MODEL", "DATA"):
        top = tmp_path / kind
        (top / "below").mkdir(parents=True)
        (top / "below" / "data.jsonl").write_bytes((models / "data.jsonl").read_bytes())
        mark(top)
        model = models / "bert" if kind == "DATA" else top / "below"
        data = top / "below" / "data.jsonl" if kind == "DATA" else models / "data.jsonl"
        line = ["convert", model, "--dataset", data, "--output", top, "--overwrite", "--device", "cpu"]
        code, _, err = cli(line)
        assert code == 2 and "which is read; choose another folder" in err
        assert (top / "below" / "data.jsonl").exists()


# Item 4.
def test_an_interrupted_tuning_run_outlives_a_mistyped_data_set(models, tmp_path, cli):
    out = tmp_path / "out"
    work = tmp_path / "out.training"
    checkpoint = work / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    write_started(work, STARTED)
    line = line_of("finetune", models, out)
    code, _, err = cli(changed(line, "--dataset", models / "datta.jsonl"))
    assert code == 2 and "does not exist" in err
    assert (checkpoint / "model.safetensors").exists()
    # With everything in order, the word counts.
    assert cli(line)[0] == 0
    assert not work.exists()


@pytest.mark.parametrize(
    "left", ["linearize_core_errors.py", "optimizer.pt", "rng_state_1.pth", "tokenizer.json", None]
)
def test_a_checkpoint_that_was_being_written_or_removed_stops_no_resume(left, tmp_path):
    """A kill leaves any part of it: the first file written is the model's code, the last removed any."""
    checkpoint = tmp_path / "out.training" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    if left is not None:
        (checkpoint / left).write_bytes(b"")
    write_started(checkpoint.parent, STARTED)
    check_work(tmp_path / "out.training", resume=True, overwrite=True)
    (checkpoint.parent / "checkpoint-9").mkdir()
    (checkpoint.parent / "checkpoint-9" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="holds 'checkpoint-9', which is not part of a tuning run"):
        check_work(tmp_path / "out.training", resume=True, overwrite=True)


def test_checkpoints_of_another_trainer_are_the_users(tmp_path):
    """They have the same names; the record of what the run was started with tells ours."""
    checkpoint = tmp_path / "out.training" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    for name in ("model.safetensors", "trainer_state.json", "optimizer.pt"):
        (checkpoint / name).write_bytes(b"")
    for record in (None, "{}", '{"epochs": 3}'):
        if record is not None:
            (checkpoint.parent / "started.json").write_text(record)
        for resume in (False, True):
            with pytest.raises(CheckpointError, match="which is not part of a tuning run of linearize"):
                check_work(checkpoint.parent, resume=resume, overwrite=True)


def test_states_of_an_earlier_version_are_known_and_others_are_the_users(tmp_path):
    states = StateFolder(tmp_path / "out.stage1", 1)
    for step in (2, 4):
        (states.folder / f"step-{step}").mkdir(parents=True)
        (states.folder / f"step-{step}" / "state.json").write_text('{"step": 2, "fingerprint": {"data contents": "a"}}')
    (states.folder / "step-2" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="holds 'step-2', which is not part of the states"):
        states.check_free(overwrite=True)
    # The oldest are dropped, if they are ours.
    states.save(6, RunState({"step": 6}, {"a": torch.ones(1)}))
    assert states.steps() == [2, 6]
    (states.folder / "step-2" / "thesis.txt").unlink()
    states.remove()
    assert not states.folder.exists()


def test_an_interrupted_distillation_outlives_a_mistyped_data_set(models, tmp_path, cli):
    out, states = tmp_path / "out", tmp_path / "out.stage1"
    (states / "step-500").mkdir(parents=True)
    (states / "step-500" / "state.json").write_text(json.dumps({"fingerprint": STARTED}))
    line = line_of("convert", models, out, "--save-every", 2)
    code, _, err = cli(changed(line, "--dataset", models / "datta.jsonl"))
    assert code == 2 and (states / "step-500" / "state.json").exists()
    code, _, err = cli(without(line, "--overwrite"))
    assert code == 2 and "holds an interrupted run; continue with --resume, or start again with --overwrite" in err
    assert (states / "step-500" / "state.json").exists()
    assert cli(line)[0] == 0 and not states.exists()


@pytest.mark.parametrize("verb", ["convert", "finetune"])
def test_what_lies_beside_the_output_and_is_not_ours_stays(verb, models, tmp_path, cli):
    out = tmp_path / "out"
    beside = tmp_path / ("out.stage1" if verb == "convert" else "out.training")
    beside.mkdir()
    (beside / "thesis.txt").write_text("years of work")
    code, _, err = cli(line_of(verb, models, out, *(["--save-every", 2] if verb == "convert" else [])))
    assert code == 2 and "holds 'thesis.txt', which is not part of" in err
    assert (beside / "thesis.txt").read_text() == "years of work"
    # States that were not asked for are not looked at, and not removed in the end.
    if verb == "convert":
        assert cli(line_of(verb, models, out))[0] == 0
        assert (beside / "thesis.txt").exists()


# Item 5.
def test_two_writers_do_not_both_say_done(models, tmp_path):
    """Started together; each must either be the one whose result is there, or say that it is not."""
    out = tmp_path / "out"
    said = {seed: tmp_path.with_name(f"{tmp_path.name}-{seed}") for seed in (1, 2)}
    started = {
        seed: context.Process(target=run_words, args=(line_of("convert", models, out, "--seed", seed), {}, str(file)))
        for seed, file in said.items()
    }
    for one in started.values():
        one.start()
    for one in started.values():
        one.join()
    done = [seed for seed, one in started.items() if one.exitcode == 0]
    assert len(done) == 1, [file.read_text() for file in said.values()]
    (refused,) = (said[seed].read_text() for seed, one in started.items() if one.exitcode)
    assert "is being written by process" in refused or "exists and is not empty" in refused
    assert json.loads((out / "config.json").read_text())["linearize"]["seed"] == done[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def _hold(target, ready, go):
    with claim(target, overwrite=True):
        ready.set()
        go.wait(120)


@contextlib.contextmanager
def held(target):
    """Another process has the output; its number."""
    ready, go = context.Event(), context.Event()
    child = context.Process(target=_hold, args=(str(target), ready, go))
    child.start()
    try:
        assert ready.wait(120)
        yield child.pid
    finally:
        go.set()
        child.join(60)


def test_an_output_that_is_claimed_is_refused_at_once_and_free_afterwards(tmp_path):
    out = tmp_path / "out"
    with held(out) as number, pytest.raises(CheckpointError, match=f"is being written by process {number}"), claim(out):
        pass
    # A claim within a claim is the same one.
    with claim(out, overwrite=True), atomic_folder(out, overwrite=True) as fresh:
        (fresh / "a").write_text("b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_two_runs_do_not_train_one_cell(models, tmp_path, cli):
    line = line_of("run", models, tmp_path / "run")
    assert cli([*line, "--only", "softmax-*"])[0] == 0
    with held(tmp_path / "run" / "cells" / "hedgehog-mine-s0") as number:
        code, _, err = cli([*line, "--resume"])
    assert code == 2 and f"hedgehog-mine-s0' is being written by process {number}" in err
    assert cli([*line, "--resume"])[0] == 0


def test_what_came_meanwhile_is_not_replaced(tmp_path):
    """The target is looked at again before the rename, also by processes that know of no lock."""
    with pytest.raises(CheckpointError, match="exists and is not empty"), atomic_folder(tmp_path / "out") as fresh:
        (fresh / "a").write_text("b")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with (
        pytest.raises(CheckpointError, match=r"holds 'thesis\.txt'"),
        atomic_folder(tmp_path / "out", overwrite=True) as fresh,
    ):
        (fresh / "a").write_text("b")
    assert tree(tmp_path) == {"out/thesis.txt": b"years of work"}


# Links out of a checkpoint.
READ = [
    "special_tokens_map.json",
    "chat_template.jinja",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    "1_Pooling/model.safetensors",
    "1_Pooling",
    "additional_chat_templates/mine.jinja",
    "log.jsonl",
    "README.md",
    "modules.json",
]


@pytest.mark.parametrize("file", READ)
def test_a_link_out_of_a_checkpoint_is_refused(file, models, tmp_path, cli):
    """Whoever made the folder would have a file of the user's copied into the output, and pushed from there."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text('{"password": "hunter2"}')
    for verb, name in (("convert", "bert"), ("distill", "hedgehog"), ("finetune", "hedgehog")):
        folder = tmp_path / verb
        shutil.copytree(models / name, folder)
        (folder / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}]))
        link = folder / file
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / "secret" if file == "1_Pooling" else tmp_path / "secret" / "config.json")
        line = line_of(verb, models, tmp_path / "out")
        code, _, err = cli([line[0], folder, *line[2:]])
        assert code == 2 and len(err.splitlines()) == 1, err
        assert f"holds {file!r}, a link to " in err and "outside the checkpoint" in err
        assert not (tmp_path / "out").exists()


def test_links_inside_and_in_the_hubs_cache_are_followed(models, tmp_path):
    cache = tmp_path / "models--alice--bert"
    snapshot = cache / "snapshots" / "0123abcd"
    for folder in (snapshot, cache / "blobs", tmp_path / "other" / "blobs"):
        folder.mkdir(parents=True)
    for number, file in enumerate((models / "bert").iterdir()):
        shutil.copy(file, cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "again.json").symlink_to("config.json")
    (tmp_path / "link").symlink_to(snapshot)
    for name in (snapshot, tmp_path / "link"):
        check_links(name)
        load_model(str(name))
    # The blobs of another repository, and blobs that lie elsewhere themselves.
    (tmp_path / "other" / "blobs" / "0").write_text("secret")
    (snapshot / "extra.json").symlink_to("../../../other/blobs/0")
    with pytest.raises(CheckpointError, match=r"a link to .* outside the checkpoint"):
        check_links(snapshot)
    (snapshot / "extra.json").unlink()
    (cache / "blobs").rename(tmp_path / "moved")
    (cache / "blobs").symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"a link to .* outside the checkpoint"):
        check_links(snapshot)


PATHS = [".", "./", "./.", "/", "/etc", "..", "../x", "1/../..", "a//b", "x" * 300, "a/" * 3000 + "a", "a\0b", "a\nb"]


@pytest.mark.parametrize("path", PATHS, ids=range(len(PATHS)))
def test_a_module_lies_in_a_folder_inside_the_checkpoint(path, models, tmp_path, cli):
    folder = shutil.copytree(models / "bert", tmp_path / "bert")
    (folder / "modules.json").write_text(json.dumps([{"path": ""}, {"path": path}]))
    code, _, err = cli(["convert", folder, "--distill-steps", 0, "--output", tmp_path / "out", "--device", "cpu"])
    assert code == 2 and len(err.splitlines()) == 1 and "expected a folder inside the checkpoint" in err, err
    assert not (tmp_path / "out").exists()


# What lies around an output.
LOCKS = {"notes": b"years of work", "a number": b"4711\n", "binary": b"\xff\xfe", "link": None, "folder": None}


@pytest.mark.parametrize("kind", LOCKS)
def test_a_file_of_the_users_where_the_lock_would_lie_stays(kind, tmp_path):
    lock = tmp_path / ".lock-out"
    (tmp_path / "notes.txt").write_text("locked by linearize, process 12\n")
    {"link": lambda: lock.symlink_to("notes.txt"), "folder": lock.mkdir}.get(
        kind, lambda: lock.write_bytes(LOCKS[kind])
    )()
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match="is where the lock of output"), claim(tmp_path / "out"):
        pass
    clear_leftovers(tmp_path)
    assert tree(tmp_path) == before and os.path.lexists(lock)


def test_a_resumed_run_removes_only_what_is_its_own(models, tmp_path, cli):
    line, out = line_of("run", models, tmp_path / "run", "keep_models=false"), tmp_path / "run"
    assert cli([*line, "--only", "softmax-*"])[0] == 0
    mine = [out / ".work" / "thesis.txt", out / ".work" / "cells" / "mine" / "thesis.txt", out / "mine.safetensors"]
    mine += [out / "cells" / "softmax-mine-s0" / "mine.safetensors", out / ".lock-mine"]
    for file in mine:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("years of work")
    code, _, err = cli([*line, "--resume"])
    assert code == 0, err
    assert all(file.read_text() == "years of work" for file in mine)
    assert sorted(file for file in out.rglob("*.safetensors")) == sorted(mine[2:4])


PICTURES = {
    "bench": ["bench", "--lengths", "8", "--heads", 1, "--head-dim", 4],
    "search": ["search"],
    "convert": ["convert"],
}


WRITTEN = [*((verb, "--plot") for verb in ("bench", "search")), ("search", "--plan-out")]


@pytest.mark.parametrize(("verb", "option"), [*WRITTEN, ("convert", "--plan-out")])
def test_a_file_that_exists_is_not_replaced(verb, option, models, tmp_path, cli):
    photo = tmp_path / ("photo.png" if option == "--plot" else "photo.yaml")
    photo.write_text("a photo")
    data = ["--dataset", models / "data.jsonl", "--text-column", "text", "--device", "cpu"]
    more = {"search": [models / "bert", *data]}.get(verb, [])
    if verb == "convert":
        more = [models / "bert", "--kernel", "auto", *data, "--output", tmp_path / "out"]
    code, _, err = cli([*PICTURES[verb], *more, option, photo])
    assert code == 2 and "exists; choose another file, or pass --overwrite" in err and len(err.splitlines()) == 1, err
    assert photo.read_text() == "a photo" and [path.name for path in tmp_path.iterdir()] == [photo.name]


def test_overwrite_replaces_a_picture(tmp_path, cli):
    (tmp_path / "photo.png").write_text("a photo")
    (tmp_path / "link.png").symlink_to("photo.png")
    for name in ("link.png", "new.png"):
        line = [*PICTURES["bench"], "--repeats", 1, "--no-memory", "--plot", tmp_path / name, "--overwrite"]
        assert cli(line)[0] == 0
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    # A link gives way; what it leads to stays.
    assert (tmp_path / "photo.png").read_text() == "a photo"
