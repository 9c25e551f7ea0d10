"""Find the verb, run it, turn errors into one line and an exit code."""

from __future__ import annotations

import _thread
import argparse
import contextlib
import errno
import importlib
import itertools
import os
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from linearize.core.errors import (
    ConfigError,
    LinearizeError,
    NotSavedError,
    first_line,
    missing_package,
    printable,
    unknown_name,
)

VERBS = {
    "convert": "convert a checkpoint: plan, distil, save",
    "search": "choose the kernel of every layer under a budget",
    "distill": "continue the distillation of a converted checkpoint",
    "align": "bring a converted checkpoint as a whole close to its original",
    "finetune": "tune a checkpoint on a task",
    "evaluate": "measure a checkpoint on a task, and its original",
    "longdoc": "long documents from end to end: convert, tune, compare with the original and its chunks",
    "init": "make an untrained linear model from a config",
    "run": "run a recipe: a published table, or a demonstration",
    "recipes": "list the recipes, print one, or write one to start from",
    "results": "show the table of a run, with the paper's figures",
    "kernels": "list the kernels, explain one, or advise for a model",
    "inspect": "show what a model or a converted checkpoint is",
    "export": "write a converted checkpoint as ONNX, checked in onnxruntime",
    "push": "upload a converted checkpoint to the Hub",
    "report": "show a converted checkpoint: pictures, figures, one page",
    "compare": "compare several conversions",
    "bench": "measure speed and memory of softmax and kernels",
    "native": "compile the optional native op for the CPU, or say whether it is there",
    "completion": "print a script with which a shell completes verbs, options and names",
    "demo": "convert a small real model here, without a network",
}

EPILOG = """examples:
  linearize convert roberta-base --kernel hedgehog --max-length 4096
  linearize convert ./my-bert --kernel flexformer_n --dataset reviews.jsonl --dry-run
  linearize kernels hedgehog
  linearize bench --kernel flexformer_n
  linearize demo

linearize VERB --help explains a verb."""

REMOVED = {
    "--swaps": "the whole model chooses between the best plans and one kernel in every layer",
    "--search-swaps": "the whole model chooses between the best plans and one kernel in every layer",
    "--widths": "name numbers of features with the candidates, as in hedgehog:features=128",
    "--goals": "run python -m benchmarks.goals in a checkout",
    "--alignment": "run python -m benchmarks.steps alignment in a checkout",
    "--stage-one": "run python -m benchmarks.steps stage-one in a checkout",
}
"""Options of earlier versions, and what to do instead."""
INTERRUPTED = 130
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
"""The disk, the quota or a limit on files: errors that need no traceback."""


class Parser(argparse.ArgumentParser):
    """Suggests what a mistyped option meant instead of printing the whole usage; long options are never abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args: Sequence[str], namespace: argparse.Namespace | None = None) -> argparse.Namespace:  # type: ignore[override]
        """Refuse an unknown option first; argparse would rather report the missing one that it was meant to be."""
        from linearize.cli._options import config_file, parse_with_file, read_options

        words = list(args)
        options = [option for action in self._actions for option in action.option_strings]
        for word in itertools.takewhile("--".__ne__, words):
            name = word.partition("=")[0]
            if name in REMOVED and name not in options:
                raise ConfigError(f"option {name} was removed; leave it out: {REMOVED[name]}")
            if name.startswith("--") and name not in options:
                near = get_close_matches(name, options, n=1, cutoff=0.5)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise ConfigError(f"unknown option {name!r}.{hint} See: {self.prog} --help")
        file = config_file(words)
        if file is not None:
            return parse_with_file(self, words, read_options(file, self))
        # Options may come between and before positional arguments, as in `run RECIPE --output DIR key=value`.
        return super().parse_intermixed_args(words, namespace)

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise instead of printing and leaving."""
        raise ConfigError(f"{message}; see: {self.prog} --help")


def build_parser(verb: str) -> Parser:
    """Build the parser of one verb; heavy imports happen only when the verb runs."""
    from linearize.cli._options import add_config_file

    module = importlib.import_module(f"linearize.cli.{verb}")
    parser = Parser(prog=f"linearize {verb}", description=module.__doc__, epilog=module.EPILOG)
    module.add_arguments(parser)
    add_config_file(parser)
    return parser


def overview() -> str:
    """Return the text of `linearize --help`."""
    lines = "\n".join(f"  {name:<10} {what}" for name, what in VERBS.items())
    usage = "usage: linearize VERB [options]\n\nLinear attention for any pretrained Transformer."
    return f"{usage}\n\nverbs:\n{lines}\n\n{EPILOG}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; None: those of the process.

    Returns:
        Exit code: 0 for success, 2 for what the user can put right, 130 when interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Checkpoints record the line that made them (`linearize.jobs.command`).
    before, sys.argv = sys.argv, ["linearize", *arguments]
    # Long work shows its own progress, which these would overwrite.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if argv is None:
        sys.unraisablehook = _interrupt_again
    try:
        try:
            code = _dispatch(arguments)
            # Report here what cannot be written, not when Python ends.
            sys.stdout.flush()
            return code
        except ModuleNotFoundError as error:
            raise missing_package(error) or error from error
    except LinearizeError as error:
        text = f"linearize: error: {' '.join(str(error).split())}"
        if isinstance(error, NotSavedError):
            text += f"; what was trained is kept in {error.kept!r}, and saved by: {saving(arguments, error)}"
        print(printable(text), file=sys.stderr)
        return 2
    except RecursionError:
        print("linearize: error: a file or value is nested too deeply; expected fewer levels", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        kept = str(interrupt) or "nothing was written"
        print(f"\nlinearize: interrupted: {printable(kept)}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # As in `linearize kernels | head`, which is no error.
        _drop_output()
        return 0
    except (OSError, RuntimeError) as error:
        from linearize.checkpoint.output import is_write_error

        if not is_write_error(error) or (isinstance(error, OSError) and error.errno not in FULL):
            raise
        text = f"linearize: error: cannot write ({first_line(error)}); make room, then run it again"
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr)
        with contextlib.suppress(OSError):
            _drop_output()
        return 2
    finally:
        sys.argv = before
        if argv is None:
            # Only the main thread may do this.
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGINT, _end_at_once)


def _drop_output() -> None:
    """Let Python flush its standard output into nothing when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Raise a Ctrl-C again that Python ignored, as it does in the callbacks of an import."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        # From another thread: raised here, it would be ignored once more.
        again = threading.Timer(0.01, _thread.interrupt_main)
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(unraisable)


def _end_at_once(*_: object) -> None:
    """Answer a Ctrl-C while Python ends, when an exception would not be caught any more."""
    os.write(2, b"\nlinearize: interrupted while it ended: its work was done\n")
    os._exit(INTERRUPTED)


def saving(arguments: Sequence[str], error: NotSavedError) -> str:
    """Return the line that saves what was trained: the same line, resumed, perhaps with another output."""
    from linearize.jobs.command import without

    words = without(error.command or arguments, ["--resume"])
    if error.output is not None:
        words = [*without(words, ["--output"]), "--output", error.output]
    return shlex.join(["linearize", *words, "--resume"])


def _dispatch(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else ""
    if verb in ("", "-h", "--help", "help"):
        print(overview())
        return 0 if arguments else 2
    if verb in ("-V", "--version"):
        from linearize import __version__

        print(f"linearize {__version__}")
        return 0
    if verb not in VERBS:
        raise unknown_name("verb", verb, VERBS)
    try:
        parsed = build_parser(verb).parse_args(arguments[1:])
    except SystemExit as stop:
        return int(stop.code or 0)
    return int(importlib.import_module(f"linearize.cli.{verb}").run(parsed) or 0)
