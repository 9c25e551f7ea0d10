"""Find the verb, run it, turn errors into one line and an exit code."""

from __future__ import annotations

import _thread
import contextlib
import errno
import importlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Sequence

from linearize.cli._options import take_options
from linearize.cli.verbs import VERBS, build_parser
from linearize.core.errors import LinearizeError, NotSavedError, first_line, missing_package, printable, unknown_name

EPILOG = """examples:
  linearize convert roberta-base --kernel hedgehog --max-length 4096
  linearize convert ./my-bert --kernel flexformer_n --dataset reviews.jsonl --dry-run
  linearize kernels hedgehog
  linearize bench --kernel flexformer_n
  linearize demo

linearize VERB --help explains a verb."""

QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "critical",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
"""Settings of libraries; errors say what their logs would."""
INTERRUPTED = 130
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
"""The disk, the quota or a limit on files: errors that need no traceback."""


def overview() -> str:
    """Return the text of `linearize --help`."""
    lines = "\n".join(f"  {name:<10} {verb.summary}" for name, verb in VERBS.items())
    usage = "usage: linearize VERB [options]\n\nLinear attention for any pretrained Transformer."
    return f"{usage}\n\nverbs:\n{lines}\n\n{EPILOG}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; None: those of the process.

    Returns:
        Exit code: 0 for success, 2 for what the user can correct, 130 when interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Checkpoints record the line that made them (`linearize.jobs.advice`).
    before, sys.argv = sys.argv, ["linearize", *arguments]
    # Long work shows its own progress, which these would overwrite.
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
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
    from linearize.jobs.advice import without

    words = without(arguments, ["--resume"])
    if error.output is not None:
        words = [*without(words, ["--output"]), "--output", error.output]
    return shlex.join(["linearize", *words, "--resume"])


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in ("", "-h", "--help", "help"):
        print(overview())
        return 0 if arguments else 2
    if name in ("-V", "--version"):
        from linearize import __version__

        print(f"linearize {__version__}")
        return 0
    if name not in VERBS:
        raise unknown_name("verb", name, VERBS)
    try:
        parsed = build_parser(name).parse_args(arguments[1:])
    except SystemExit as stop:
        return int(stop.code or 0)
    # Options are checked before the verb's module and all that it needs are imported.
    verb = VERBS[name]
    given = (parsed,) if verb.job is None else (take_options(parsed, verb.job), parsed)
    # What a verb returns is its exit code, or what --json prints.
    result = getattr(importlib.import_module(f"linearize.cli.{verb.module}"), name)(*given)
    if result is not None and not isinstance(result, int) and parsed.json:
        from linearize.cli._output import print_json

        print_json(result)
    return result if isinstance(result, int) else 0


__all__ = ["VERBS", "build_parser", "main"]
