"""Find the verb, run it, turn errors into one line and an exit code."""

from __future__ import annotations

import _thread
import contextlib
import importlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence

from linearize.cli._options import take_options
from linearize.cli.verbs import VERBS, build_parser
from linearize.core import errors
from linearize.core.errors import LinearizeError, NotSavedError, first_line, printable

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
"""Settings of libraries; errors contain what their logs would report."""
INTERRUPTED = 130
ORPHANED = 143
"""As if the launcher had ended the process (SIGTERM)."""
LAUNCHED = "TORCHELASTIC_RUN_ID"
"""A variable that torchrun sets; workers that a shell started may outlive it."""
WATCH = 1.0
"""Seconds between two looks at the launcher."""

GRACE = 5.0
"""Seconds that the first worker has to report an error before others do."""


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
        Exit code: 0 for success, 2 for errors that the user can correct, 130 if interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Checkpoints record the command line that made them (`linearize.checkpoint.provenance`).
    before, sys.argv = sys.argv, ["linearize", *arguments]
    # Long work shows its own progress, which these would overwrite.
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if argv is None:
        sys.unraisablehook = _interrupt_again
        end_with_launcher()
    _replace_closed()
    try:
        try:
            code = _dispatch(arguments)
            # Report a failed write here, not when Python exits.
            sys.stdout.flush()
            return code
        except ModuleNotFoundError as error:
            raise errors.missing_package(error) or error from error
    except LinearizeError as error:
        text = f"linearize: error: {' '.join(str(error).split())}"
        if isinstance(error, NotSavedError):
            text += f"; the trained state is kept in {error.kept!r}; save it with: {saving(arguments, error)}"
        return _fail(text)
    except RecursionError:
        return _fail("linearize: error: a file or value is nested too deeply; expected fewer levels")
    except KeyboardInterrupt as interrupt:
        kept = str(interrupt) or "nothing was written"
        print(f"\nlinearize: interrupted: {printable(kept)}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # As in `linearize kernels | head`, which is not an error.
        _drop_output()
        return 0
    except (OSError, RuntimeError, MemoryError) as error:
        explained = _explained(error)
        if explained is None:
            raise
        with contextlib.suppress(OSError):
            _fail(f"linearize: error: {explained}")
        with contextlib.suppress(OSError):
            _drop_output()
        return 2
    finally:
        sys.argv = before
        if argv is None:
            # Only the main thread may do this.
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGINT, _end_at_once)


def end_with_launcher() -> None:
    """Exit once torchrun (or `accelerate launch`, which calls it) is gone: killed by `kill -9`, it ends no worker."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(WATCH)
        # The main thread may wait for other workers forever; results are complete or absent at any moment.
        os._exit(ORPHANED)

    if LAUNCHED in os.environ:
        threading.Thread(target=watch, daemon=True).start()


def _fail(text: str) -> int:
    """Print an error and return its exit code; of the workers of torchrun that fail alike, one prints it."""
    if LAUNCHED in os.environ and os.environ.get("RANK", "0") != "0":
        # If the first worker fails too, torchrun ends this one meanwhile.
        time.sleep(GRACE)
    print(printable(text), file=sys.stderr)
    return 2


def _explained(error: Exception) -> str | None:
    """Return what to say of a full disk or of memory that ran out, which need no traceback; None for other errors."""
    from linearize.checkpoint.output import is_write_error

    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        return f"cannot write a temporary file ({first_line(error)}); make room there, or set TMPDIR to another folder"
    if is_write_error(error) and (not isinstance(error, OSError) or error.errno in errors.FULL):
        return f"cannot write ({first_line(error)}); free some space, then run it again"
    from linearize.evaluation.bench.memory import is_out_of_memory

    if is_out_of_memory(error):
        return f"memory ran out ({first_line(error)}); use smaller batches, shorter rows, or a machine with more"
    return None


def _replace_closed() -> None:
    """Give up what is written to a standard stream that was closed before the program started (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _drop_output() -> None:
    """Discard what Python flushes to standard output when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Re-raise a Ctrl-C that Python ignored, as it does in callbacks during an import."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        # From another thread: raised here, it would be ignored again.
        again = threading.Timer(0.01, _thread.interrupt_main)
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(unraisable)


def _end_at_once(*_: object) -> None:
    """Handle a Ctrl-C while Python exits, when an exception would no longer be caught."""
    os.write(2, b"\nlinearize: interrupted while exiting, after its work was done\n")
    os._exit(INTERRUPTED)


def saving(arguments: Sequence[str], error: NotSavedError) -> str:
    """Return the command line that saves the trained state: the same line with --resume, maybe with another output."""
    from linearize.checkpoint.provenance import without

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
        raise errors.unknown_name("verb", name, VERBS)
    try:
        parsed = build_parser(name).parse_args(arguments[1:])
    except SystemExit as stop:
        return int(stop.code or 0)
    # Options are checked before the verb's module and its dependencies are imported.
    verb = VERBS[name]
    given = (parsed,) if verb.job is None else (take_options(parsed, verb.job), parsed)
    from linearize.cli._output import console, print_json

    # With --json stdout is for programs, and people read stderr.
    out = console(to_stderr=parsed.json)
    # A verb returns its exit code, or the data that --json prints.
    result = getattr(importlib.import_module(f"linearize.cli.{verb.module or name}"), name)(*given, out)
    if result is not None and not isinstance(result, int) and parsed.json:
        print_json(result)
    return result if isinstance(result, int) else 0


__all__ = ["VERBS", "build_parser", "main"]
