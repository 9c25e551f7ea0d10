"""Completion of shells: the scripts know every verb and option, and bash completes with them."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from support.command_lines import run

from linearize.cli.completion import whole_parser
from linearize.cli.verbs import SHELLS, VERBS

pytest.importorskip("shtab")


@pytest.fixture(scope="module")
def parsers():
    return whole_parser()._subparsers._group_actions[0].choices


def script(shell, capsys):
    code, out, _ = run(capsys, "completion", shell)
    assert code == 0
    return out


def test_names_are_those_that_a_verb_takes(parsers):
    assert list(parsers) == list(VERBS)
    choices = {verb: {a.dest: a.choices for a in parser._actions} for verb, parser in parsers.items()}
    assert "auto" in choices["convert"]["kernel"] and "auto" not in choices["init"]["kernel"]
    assert {"similarity", "retrieval"} <= set(choices["evaluate"]["task"])
    assert not {"similarity", "retrieval"} & set(choices["finetune"]["task"])
    assert "minilm-glue" in choices["run"]["recipe"] and "validation_limit" in choices["finetune"]


@pytest.mark.parametrize("shell", SHELLS)
def test_all_verbs_and_options_are_known(shell, parsers, capsys):
    text = script(shell, capsys)
    for verb, parser in parsers.items():
        assert verb in text
        for action in parser._actions:
            names = [name for name in action.option_strings if name.startswith("--")]
            assert all((name.removeprefix("--") if shell == "fish" else name) in text for name in names)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes(capsys, tmp_path, monkeypatch):
    text = script("bash", capsys)
    (tmp_path / "my-model").mkdir()

    def complete(*words):
        """Let bash complete the last word of a line, as it does when the tab key is pressed."""
        line = " ".join(f"'{word}'" for word in words)
        code = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_linearize linearize "{words[-1]}"'
        code += f' "{words[-2]}"; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(
            ["bash", "-c", f"{text}\n{code}"], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        return done.stdout.split()

    assert complete("linearize", "con") == ["convert"]
    assert complete("linearize", "convert", "m", "--distill-st") == ["--distill-steps"]
    assert complete("linearize", "convert", "--kernel", "flex") == ["flexformer_n", "flexformer_s"]
    assert complete("linearize", "finetune", "x", "--task", "col") == ["cola"]
    assert complete("linearize", "run", "minilm-g") == ["minilm-glue"]
    assert complete("linearize", "results", "x", "--format", "j") == ["json"]
    assert complete("linearize", "inspect", "my") == ["my-model"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_read_theirs(shell, tmp_path, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    file = tmp_path / "script"
    file.write_text(script(shell, capsys))
    subprocess.run([shell, "-n", str(file)], check=True)


def test_an_unknown_shell_is_refused(capsys):
    code, _, err = run(capsys, "completion", "tcsh")
    assert code == 2 and "tcsh" in err and err.count("\n") == 1
