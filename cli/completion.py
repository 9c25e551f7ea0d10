"""Run `completion`: print a script for shell completion of verbs, options, kernels, tasks and recipes."""

from __future__ import annotations

import argparse

import shtab

from linearize.cli._output import Screen
from linearize.cli.verbs import VERBS, build_parser
from linearize.core.registry import kernel_infos
from linearize.jobs.presets import AUTO, PRESETS
from linearize.jobs.recipes.recipe import recipe_names
from linearize.training.stage_two.tasks import TASKS


def completion(args: argparse.Namespace, out: Screen) -> object:
    """Print the script, without wrapping its lines."""
    script = shtab.complete(whole_parser(), shell=args.shell)
    if not args.json:
        print(script)
    return {"shell": args.shell, "script": script}


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser for all verbs; its options complete the names that they take, or files."""
    kernels = [info.name for info in kernel_infos()]
    values = {"kernel": kernels, "preset": list(PRESETS), "task": list(TASKS), "device": ["auto", "cpu", "cuda", "mps"]}
    trained = [name for name, task in TASKS.items() if task.head.name != "feature-extraction"]
    names = {("convert", "kernel"): [AUTO, *kernels], ("finetune", "task"): trained, ("kernels", "name"): kernels}
    names |= {("run", "recipe"): recipe_names(), ("recipes", "name"): recipe_names()}
    whole = argparse.ArgumentParser("linearize")
    whole.add_argument("--version", action="store_true", help="print the version")
    verbs = whole.add_subparsers(dest="verb")
    for verb in VERBS:
        parser = build_parser(verb)
        for action in parser._actions:
            if action.choices is None and action.nargs != 0:
                action.choices = names.get((verb, action.dest), values.get(action.dest))
            if action.choices is None:
                vars(action)["complete"] = shtab.FILE
        # `add_parser` would build a new parser.
        verbs._name_parser_map[verb] = parser
        verbs._choices_actions.append(verbs._ChoicesPseudoAction(verb, [], VERBS[verb].summary))
    return whole
