"""The command line started as two processes: one speaks and writes, and the result is that of one process."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
import transformers
from support.command_lines import run
from support.forks import together
from support.processes import launch
from support.rounding import assert_moved_alike

from linearize.cli import main
from linearize.cli.main import GRACE

SCRIPT = os.path.join(os.path.dirname(sys.executable), "linearize")


def program(words):
    sys.exit(main([str(word) for word in words]))


def line(root, *arguments):
    return ["convert", root / "gpt2", "--dataset", root / "data.jsonl", *arguments]


@pytest.mark.slow
def test_a_childs_own_error_is_shown(folders, tmp_path):
    """One that is found before anything heavy is imported, as the launcher alone takes long enough; it is said once."""
    with pytest.raises(AssertionError, match=r"process 0 said:\n(.|\n)*linearize: error: .*nowhere"):
        launch([SCRIPT, *line(folders, "--nowhere", "--output", tmp_path / "out")], 2, tmp_path / "logs")
    said = [path.read_text().count("linearize: error") for path in (tmp_path / "logs").rglob("stderr.log")]
    assert sorted(said) == [0, 1]


@pytest.mark.parametrize(("rank", "waits"), [("0", []), ("1", [GRACE])])
def test_a_later_worker_lets_the_first_one_say_what_is_wrong(rank, waits, monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(sys.modules[main.__module__], "time", SimpleNamespace(sleep=waited.append))
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": rank}.items():
        monkeypatch.setenv(name, value)
    assert main(["convert", "--nowhere"]) == 2
    assert capsys.readouterr().err.count("linearize: error") == 1
    assert waited == waits


def test_two_processes_convert_like_one(folders, tmp_path, capsys):
    common = ["--holdout", 8, "--distill-steps", 4, "--save-every", 2, "--json"]
    alone = line(folders, *common, "--batch-size", 8, "--device", "cpu", "--output", tmp_path / "one")
    code, one, _ = run(capsys, *alone)
    assert code == 0
    two, other = together(program, line(folders, *common, "--batch-size", 4, "--output", tmp_path / "two"))
    whole, parts = json.loads(one), json.loads(two)
    assert other == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    for time in ("before", "after"):
        one, two = (found["distillation"][time]["mean"]["kl"] for found in (whole, parts))
        assert one == pytest.approx(two, abs=1e-6)
    assert run(capsys, *alone[:-1], tmp_path / "start", "--distill-steps", 0)[0] == 0
    load = transformers.AutoModelForCausalLM.from_pretrained
    start, one, two = (load(tmp_path / name).state_dict() for name in ("start", "one", "two"))
    for name, tensor in one.items():
        assert_moved_alike(tensor, two[name], start[name])


@pytest.mark.slow
def test_two_processes_evaluate_like_one_and_one_speaks(folders, tmp_path, tmp_path_factory, capsys):
    logs = tmp_path_factory.mktemp("logs")
    words = ["evaluate", folders / "gpt2", "--task", "causal-lm", "--dataset", folders / "data.jsonl", "--json"]
    code, one, _ = run(capsys, *words, "--max-length", 16, "--device", "cpu")
    assert code == 0
    two = launch([SCRIPT, *words, "--max-length", 16], 2, logs)
    assert json.loads(two)["figures"] == pytest.approx(json.loads(one)["figures"], rel=1e-5)
    (second,) = (path for path in logs.rglob("stdout.log") if path.parent.name == "1")
    assert second.read_text() == ""
