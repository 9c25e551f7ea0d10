"""Pushing to a Hub on loopback, incl. a connection that breaks halfway."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from support import forks
from support.fake_hub import TOKEN, FakeHub
from support.tiny import converted, original

import linearize
from linearize.checkpoint.ownership import check_ours
from linearize.checkpoint.push import check_repo, files_to_push, is_converted
from linearize.cli import main
from linearize.core.errors import ConfigError

CODE = """
import sys
from linearize.checkpoint.push import push
from linearize.core.errors import LinearizeError
try:
    print(push(sys.argv[1], sys.argv[2], sys.argv[3] == "private"))
except LinearizeError as error:
    sys.exit(f"{type(error).__name__}: {error}")
assert "torch" not in sys.modules
"""


@pytest.fixture
def hub():
    made = FakeHub()
    made.address = made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("push") / "out"
    linearize.save(converted("bert"), target)
    return target


def push(hub, folder, home, repo="alice/tiny", visibility="public", token=TOKEN):
    """Run push in a process of its own: huggingface_hub reads its settings on import."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(home),
        "NO_PROXY": "127.0.0.1",
    }
    environment.pop("HF_TOKEN", None)
    if token:
        environment["HF_TOKEN"] = token
    done = subprocess.run(
        [sys.executable, "-c", CODE, folder, repo, visibility], env=environment, capture_output=True, text=True
    )
    assert TOKEN not in done.stdout + done.stderr
    assert not [path for path in home.rglob("*") if path.is_file() and TOKEN in path.read_text(errors="ignore")]
    return done


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".linearize.json"}


@pytest.mark.parametrize("visibility", ["public", "private"])
def test_push_makes_the_repository_and_sends_everything(visibility, hub, folder, tmp_path):
    done = push(hub, folder, tmp_path, visibility=visibility)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{hub.address}/alice/tiny"
    assert hub.repos == {"alice/tiny": visibility == "private"}
    assert hub.files == content(folder)
    assert {"README.md", "modeling_linearize.py", "model.safetensors", "config.json"} <= set(hub.files)
    assert hub.commits == 1
    assert hub.tokens <= {f"Bearer {TOKEN}", None}


def test_a_connection_broken_halfway_is_tried_again(hub, folder, tmp_path):
    hub.breaks = 1
    done = push(hub, folder, tmp_path)
    assert done.returncode == 0, done.stderr
    assert hub.files == content(folder)
    assert hub.commits == 1
    assert len([line for line in hub.seen if line.startswith("PUT")]) == 2


def test_pushing_again_sends_only_what_is_new(hub, folder, tmp_path):
    for _ in range(2):
        assert push(hub, folder, tmp_path).returncode == 0
    assert len([line for line in hub.seen if line.startswith("PUT")]) == 1


@pytest.mark.parametrize(("status", "message"), [(401, "hf auth login"), (403, "may not write"), (404, "no such user")])
def test_refusals_are_one_clear_line(status, message, hub, folder, tmp_path):
    hub.refuse = status
    done = push(hub, folder, tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("CheckpointError: could not push to 'alice/tiny'")
    assert message in done.stderr
    assert hub.commits == 0


def test_no_hub_at_all(folder, tmp_path):
    hub = FakeHub()
    hub.address = "http://127.0.0.1:9"
    done = push(hub, folder, tmp_path)
    assert done.returncode == 1
    assert "ConnectError" in done.stderr and "try again with linearize push" in done.stderr
    assert "Traceback" not in done.stderr


def test_not_a_checkpoint(hub, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    done = push(hub, empty, tmp_path)
    assert done.returncode == 1
    assert "no config.json" in done.stderr
    assert hub.seen == []


@pytest.mark.parametrize(
    "name", ["", "tiny", "alice/", "a/b/c", "https://huggingface.co/alice/tiny", "alice/ti ny", None]
)
def test_names_are_checked_first(name):
    with pytest.raises(ConfigError, match="USER/NAME"):
        check_repo(name)


def test_names_that_are_fine():
    assert check_repo("alice/bert-hedgehog_v1.0") == "alice/bert-hedgehog_v1.0"


def command_line(address, words):
    """Run a command line in a fork, where huggingface_hub has read its settings before: those of an environment."""
    from huggingface_hub import constants

    constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = address, False, True
    sys.exit(main([str(word) for word in words]))


def test_the_command_line_pushes(hub, folder, tmp_path, capsys):
    """`linearize push`, and `convert --push-to-hub`, end in the same upload."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": TOKEN,
        "NO_PROXY": "127.0.0.1",
    }
    original("bert").save_pretrained(tmp_path / "model")
    push_it = ["push", folder, "alice/tiny", "--private"]
    arguments = ["convert", tmp_path / "model", "--distill-steps", "0", "--output", tmp_path / "out"]
    done = forks.run(command_line, hub.address, push_it, environment=environment)
    assert done.returncode == 0, done.stderr
    assert f"{hub.address}/alice/tiny" in done.stdout
    assert hub.repos == {"alice/tiny": True}
    assert TOKEN not in done.stdout + done.stderr
    convert = [*arguments, "--push-to-hub", "alice/other"]
    done = forks.run(command_line, hub.address, convert, environment=environment)
    assert done.returncode == 0, done.stderr
    assert "alice/other" in hub.repos
    assert hub.files["config.json"] == (tmp_path / "out" / "config.json").read_bytes()
    assert main([*map(str, arguments[:-1]), str(tmp_path / "no"), "--push-to-hub", "alice"]) == 2
    assert "expected USER/NAME" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def litter(folder, tmp_path):
    """A checkpoint with what may lie about in its folder."""
    out = shutil.copytree(folder, tmp_path / "out")
    for name in ("train.log", ".env", "onnx/model.onnx", "checkpoint-5/model.safetensors", "notes.json"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    return out


def test_only_the_files_of_a_checkpoint_are_sent(hub, folder, tmp_path, capsys):
    out = litter(folder, tmp_path)
    done = push(hub, out, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert sorted(hub.files) == sorted(content(folder))
    # The card has another size now; the folder is still known as ours.
    for name in ("train.log", ".env", "onnx", "checkpoint-5", "notes.json"):
        shutil.rmtree(out / name) if (out / name).is_dir() else (out / name).unlink()
    check_ours(out, "out")
    assert "alice/tiny" in (out / "README.md").read_text()


def test_a_dry_run_prints_the_list_and_sends_nothing(folder, tmp_path, capsys):
    out = litter(folder, tmp_path)
    before = content_of_all(out)
    assert main(["push", str(out), "alice/tiny", "--dry-run", "--json", "--include", "onnx/*"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["files"] == sorted([*content(folder), "onnx/model.onnx"]) and listed["url"] is None
    assert listed["left_out"] == [".env", "checkpoint-5/model.safetensors", "notes.json", "train.log"]
    assert main(["push", str(out), "alice/tiny", "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Files for alice/tiny: README.md, config.json" in said and "Not sent" in said and "train.log" in said
    assert main(["push", str(out), "alice/tiny", "--dry-run", "--include", "onyx/*"]) == 2
    assert "got 'onyx/*', which matches no file" in capsys.readouterr().err
    (out / "chat_template.jinja").symlink_to("/etc/hostname")
    assert main(["push", str(out), "alice/tiny", "--dry-run"]) == 2
    assert "holds 'chat_template.jinja', a link to '/etc/hostname' outside the checkpoint" in capsys.readouterr().err
    (out / "chat_template.jinja").unlink()
    assert content_of_all(out) == before


def content_of_all(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_sentence_embedders_modules_and_an_adapter_are_sent(folder, tmp_path):
    out = shutil.copytree(folder, tmp_path / "out")
    (out / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}]))
    for name in ("1_Pooling/config.json", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("{}")
    (out / "1_Pooling" / "notes.txt").write_text("mine")
    sent, left = files_to_push(out)
    assert left == ["1_Pooling/notes.txt"]
    assert {"modules.json", "1_Pooling/config.json", "adapter/adapter_model.safetensors"} <= set(sent)


def test_a_card_that_is_not_utf8_is_one_line(folder, tmp_path, capsys):
    out = shutil.copytree(folder, tmp_path / "out")
    (out / "README.md").write_bytes(b"caf\xe9")
    assert main(["push", str(out), "alice/tiny"]) == 2
    err = capsys.readouterr().err
    assert "README.md' cannot be given the repository's name ('utf-8' codec can't decode byte 0xe9" in err
    assert len(err.splitlines()) == 1


def test_a_folder_that_is_not_converted_is_not_called_converted(folder, tmp_path, capsys):
    """The commit called every folder converted, a tuned softmax model too."""
    original("bert").save_pretrained(tmp_path / "softmax")
    note = "is not converted: its attention is still softmax"
    for place, converted_ in ((tmp_path / "softmax", False), (folder, True)):
        assert main(["push", str(place), "alice/tiny", "--dry-run"]) == 0
        assert (note in " ".join(capsys.readouterr().out.split())) is not converted_
        assert is_converted(place) is converted_
