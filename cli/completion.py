"""Print a script that makes a shell complete verbs, options, kernels, tasks and recipes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

EPILOG = """examples:
  linearize completion bash      # in ~/.bashrc: source <(linearize completion bash)
  linearize completion zsh       # into ~/.zfunc/_linearize, with fpath+=~/.zfunc before compinit
  linearize completion fish      # into ~/.config/fish/completions/linearize.fish

The script is text made from the verbs' own options; completing starts no Python."""

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.add_argument("--json", action="store_true", help="print JSON")


@dataclass(frozen=True)
class Flag:
    """An option: its name with dashes, its help, whether a value follows, and the values it may have."""

    name: str
    help: str
    takes: bool
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verb:
    """A verb: its line of help, its options, and the names that it takes without an option."""

    name: str
    help: str
    flags: tuple[Flag, ...]
    names: tuple[str, ...] = ()


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from linearize.cli._output import print_json

    script = {"bash": bash, "zsh": zsh, "fish": fish}[args.shell](verbs())
    if args.json:
        print_json({"shell": args.shell, "script": script})
    else:
        print(script, end="")
    return 0


def verbs() -> list[Verb]:
    """Read all verbs with their options from their parsers."""
    from linearize.cli.main import VERBS, build_parser
    from linearize.experiments.recipe import recipe_names
    from linearize.finetune.tasks import TASKS
    from linearize.jobs.config import AUTO
    from linearize.jobs.presets import PRESETS
    from linearize.registry import kernel_infos

    kernels, recipes = tuple(info.name for info in kernel_infos()), tuple(recipe_names())
    values = {"--kernel": kernels, "--preset": tuple(PRESETS), "--task": tuple(TASKS)}
    trained = tuple(name for name, one in TASKS.items() if one.head.name != "feature-extraction")
    own_values = {("convert", "--kernel"): (AUTO, *kernels), ("finetune", "--task"): trained}
    values["--device"] = ("auto", "cpu", "cuda", "mps")
    names = {"kernels": kernels, "run": recipes, "recipes": recipes, "completion": SHELLS}
    found = []
    for name, text in VERBS.items():
        flags = []
        for action in build_parser(name)._actions:
            help_text = " ".join((action.help or "").replace("%%", "%").split())
            for option in action.option_strings:
                if option.startswith("--"):
                    own = tuple(map(str, action.choices or ())) or own_values.get(
                        (name, option), values.get(option, ())
                    )
                    flags.append(Flag(option, help_text, action.nargs != 0, own))
        found.append(Verb(name, text, tuple(flags), names.get(name, ())))
    return found


def bash(verbs: list[Verb]) -> str:
    """Return the script for bash."""
    cases, values = [], []
    for verb in verbs:
        flags = " ".join(flag.name for flag in verb.flags)
        cases.append(f"    {verb.name}) flags='{flags}'; names='{' '.join(verb.names)}' ;;")
        for flag in verb.flags:
            if flag.values:
                found = f"COMPREPLY=($(compgen -W '{' '.join(flag.values)}' -- \"$word\"))"
                values.append(f"    {verb.name}:{flag.name}) {found}; return ;;")
    return f"""\
# Completion of linearize for bash.
_linearize() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} verb=${{COMP_WORDS[1]}} flags= names=
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{" ".join(verb.name for verb in verbs)} --help --version' -- "$word"))
    return
  fi
  case "$verb:$before" in
{chr(10).join(values)}
  esac
  case $verb in
{chr(10).join(cases)}
  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  else
    COMPREPLY=($(compgen -W "$names" -- "$word") $(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _linearize linearize
"""


def zsh(verbs: list[Verb]) -> str:
    """Return the script for zsh."""
    described = "\n".join(f"    '{verb.name}:{_plain(verb.help)}'" for verb in verbs)
    cases = []
    for verb in verbs:
        lines = []
        for flag in verb.flags:
            what = f"({' '.join(flag.values)})" if flag.values else "_files"
            value = f":{flag.name[2:]}:{what}" if flag.takes else ""
            lines.append(f"        '{flag.name}[{_plain(flag.help)}]{value}'")
        other = f"({' '.join(verb.names)})" if verb.names else "_files"
        lines.append(f"        '*:name:{other}'")
        cases.append(f"    {verb.name})\n      _arguments \\\n" + " \\\n".join(lines) + "\n      ;;")
    return f"""\
#compdef linearize
# Completion of linearize for zsh.
_linearize() {{
  local -a verbs
  verbs=(
{described}
  )
  if (( CURRENT == 2 )); then
    _describe verb verbs
    return
  fi
  local verb=$words[2]
  shift words
  (( CURRENT-- ))
  case $verb in
{chr(10).join(cases)}
  esac
}}
if [[ $funcstack[1] == _linearize ]]; then
  # Loaded by the first completion, which it has to answer.
  _linearize "$@"
else
  compdef _linearize linearize
fi
"""


def fish(verbs: list[Verb]) -> str:
    """Return the script for fish."""
    names = " ".join(verb.name for verb in verbs)
    lines = ["# Completion of linearize for fish."]
    for verb in verbs:
        none = f"not __fish_seen_subcommand_from {names}"
        lines.append(f"complete -c linearize -f -n '{none}' -a {verb.name} -d '{_plain(verb.help)}'")
        here = f"__fish_seen_subcommand_from {verb.name}"
        if verb.names:
            lines.append(f"complete -c linearize -n '{here}' -a '{' '.join(verb.names)}'")
        for flag in verb.flags:
            values = f" -f -a '{' '.join(flag.values)}'" if flag.values else ""
            takes = " -r" if flag.takes else ""
            lines.append(
                f"complete -c linearize -n '{here}' -l {flag.name[2:]}{takes}{values} -d '{_plain(flag.help)}'"
            )
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Return a help text without what shells read as their own signs."""
    kept = "".join(sign for sign in text if sign not in "'\"`$\\[]:")
    return kept if len(kept) <= 80 else f"{kept[:77]}..."
