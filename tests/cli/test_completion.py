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


ZSH = r"""
zmodload zsh/zpty
zpty line "zsh -f -i"
zpty -w line "PS1=; RPS1=; fpath=($1 \$fpath); autoload -Uz compinit; compinit -u -D
show() { print -r -- \"\$BUFFER\" >> $1/shown; zle kill-whole-line }; zle -N show; bindkey '^T' show; echo REA''DY"
zpty -r line said '*READY*'
for typed in "${@[2,-1]}"; do
  zpty -w -n line "$typed"$'\t\x14'
done
zpty -w line "echo DO''NE"
zpty -r line said '*DONE*'
zpty -d line
"""
"""Types lines into a zsh that finds the script as a user's does, presses the tab key, and writes down what is there."""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_zsh_completes(known, tmp_path):
    """Also at the first time, when the script is loaded: it defined its function and answered nothing."""
    (tmp_path / "_linearize").write_text(zsh(known))
    expected = {
        "linearize con": "linearize convert ",
        "linearize convert m --distill-st": "linearize convert m --distill-steps ",
        "linearize convert --kernel hedg": "linearize convert --kernel hedgehog ",
        "linearize run minilm-g": "linearize run minilm-glue ",
        "linearize results x --format l": "linearize results x --format latex ",
    }
    command = ["zsh", "-f", "-c", ZSH, "zsh", str(tmp_path), *expected]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, cwd=tmp_path)
    assert (tmp_path / "shown").read_text().splitlines() == list(expected.values())


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish")
def test_fish_completes(known, tmp_path):
    (tmp_path / "script.fish").write_text(fish(known))
    expected = {
        "linearize con": ["convert"],
        "linearize convert m --distill-st": ["--distill-steps"],
        "linearize convert --kernel flex": ["flexformer_n", "flexformer_s"],
        "linearize finetune x --task col": ["cola"],
        "linearize run minilm-g": ["minilm-glue"],
        "linearize results x --format l": ["latex"],
    }
    code = "source script.fish; for line in $argv; complete -C $line; echo -- --; end"
    command = ["fish", "--no-config", "-c", code, *expected]
    done = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=tmp_path)
    # A candidate, a tab, and what it is.
    parts = done.stdout.split("--\n")[:-1]
    assert [[line.partition("\t")[0] for line in part.splitlines()] for part in parts] == list(expected.values())


def test_the_verb(capsys, known):
    for shell, make in zip(SHELLS, (bash, zsh, fish), strict=True):
        code, out, _ = run(capsys, "completion", shell)
        assert code == 0 and out == make(known)
    code, _, err = run(capsys, "completion", "tcsh")
    assert code == 2 and "tcsh" in err and err.count("\n") == 1
