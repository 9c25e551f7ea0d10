"""Completion of shells: the scripts know every verb and option, and bash completes by them."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from support.command_lines import run

from linearize.cli.completion import SHELLS, bash, fish, verbs, zsh
from linearize.cli.main import VERBS, build_parser


@pytest.fixture(scope="module")
def known():
    return verbs()


def complete(script, *words):
    """Let bash complete the last word of a line, as it does when the tab key is pressed."""
    line = " ".join(f"'{word}'" for word in words)
    code = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _linearize; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{code}"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_all_verbs_and_options_are_known(known):
    assert [verb.name for verb in known] == list(VERBS)
    for verb in known:
        options = {o for a in build_parser(verb.name)._actions for o in a.option_strings if o.startswith("--")}
        assert {flag.name for flag in verb.flags} == options
        for make in (bash, zsh, fish):
            text = make(known)
            assert all((flag.name if make is not fish else f"-l {flag.name[2:]}") in text for flag in verb.flags)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes(known, tmp_path, monkeypatch):
    script = bash(known)
    assert complete(script, "linearize", "con") == ["convert"]
    assert complete(script, "linearize", "convert", "m", "--distill-st") == ["--distill-steps"]
    assert complete(script, "linearize", "convert", "--kernel", "flex") == ["flexformer_n", "flexformer_s"]
    assert complete(script, "linearize", "finetune", "x", "--task", "col") == ["cola"]
    assert complete(script, "linearize", "run", "minilm-g") == ["minilm-glue"]
    assert complete(script, "linearize", "results", "x", "--format", "l") == ["latex"]
    assert complete(script, "linearize", "align", "--nothing-of-it") == []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    assert complete(script, "linearize", "inspect", "my") == ["my-model"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_read_theirs(shell, known, tmp_path):
    text = {"zsh": zsh, "fish": fish}[shell](known)
    for line in text.splitlines():
        assert line.count("'") % 2 == 0, line
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    file = tmp_path / "script"
    file.write_text(text)
    subprocess.run([shell, "-n", str(file)], check=True)


def test_the_verb(capsys, known):
    for shell, make in zip(SHELLS, (bash, zsh, fish), strict=True):
        code, out, _ = run(capsys, "completion", shell)
        assert code == 0 and out == make(known)
    code, _, err = run(capsys, "completion", "tcsh")
    assert code == 2 and "tcsh" in err and err.count("\n") == 1
