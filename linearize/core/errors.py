"""Every error that linearize raises on purpose.

A message states the value it got, what it expected and what to do. The command line prints it as one line and exits
with code 2, so a message contains no line break.
"""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TypeVar

_HIDDEN = (
    # Control characters can change a terminal's colours, cursor, title and earlier output.
    *(*range(0x20), *range(0x7F, 0xA0)),
    # Direction marks and line separators make text look different from what it is.
    *(0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),
    # Lone surrogates, as in file names that are not UTF-8, cannot be printed at all.
    *range(0xD800, 0xE000),
)
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
"""A full disk, quota or file size limit: errors that need no traceback."""
_REPLACED = {code: "\N{REPLACEMENT CHARACTER}" for code in _HIDDEN if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return the text with its unprintable characters, except line breaks and tabs, replaced by U+FFFD.

    Names and metadata come from whoever made a file; they must not control the reader's terminal.
    """
    return text.translate(_REPLACED)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class: our messages are one line each.

    A line that ends with a colon is joined with the next.
    """
    return re.sub(r":\s*\n\s*", ": ", str(error).strip() or type(error).__name__).splitlines()[0]


Name = TypeVar("Name")


def repeated(names: Iterable[Name]) -> Name | None:
    """Return the first name that occurs more than once; None if all differ."""
    counts = Counter(names)
    return next((name for name, count in counts.items() if count > 1), None)


def some(names: Sequence[str]) -> str:
    """Return the first of some names in quotes, and how many more there are."""
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


class LinearizeError(Exception):
    """Base of all errors raised on purpose: problems that the user can fix."""


class ConfigError(LinearizeError, ValueError):
    """An argument, option or file has a value that is not allowed."""


class UnknownNameError(ConfigError):
    """A name (kernel, option, verb ...) that is not in the list of known ones."""


class UnsupportedModelError(LinearizeError):
    """A model, or one of its attentions, that cannot be converted; the message says which case it is."""


class DataError(LinearizeError):
    """A data set that cannot be found, read or used."""


class CheckpointError(LinearizeError):
    """A checkpoint folder that cannot be read or written."""


EXTRAS = {
    **dict.fromkeys(("accelerate", "datasets", "peft", "sklearn", "xxhash"), "train"),
    **dict.fromkeys(("matplotlib",), "report"),
    **dict.fromkeys(("timm", "torchvision", "PIL"), "vision"),
    **dict.fromkeys(("gguf",), "gguf"),
    **dict.fromkeys(("bitsandbytes",), "quantize"),
    **dict.fromkeys(("sentence_transformers",), "embed"),
    **dict.fromkeys(("onnx", "onnx_ir", "onnxruntime", "onnxscript"), "export"),
}
"""Packages that the plain install does not include, and the extra (see pyproject.toml) that provides each."""


class MissingPackageError(LinearizeError, ModuleNotFoundError):
    """A required package is not part of the plain install; the message names the extra that provides it."""


def missing_package(error: ModuleNotFoundError) -> MissingPackageError | None:
    """Return the error to raise in place of an import error; None if no extra provides the package."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    advice = f'pip install "linearize[{EXTRAS[package]}]"'
    return MissingPackageError(f"this needs the package {package}, which is not installed: {advice}", name=error.name)


class NotSavedError(CheckpointError):
    """A trained result could not be written to its output; the training state is kept.

    Attributes:
        kept: folder of the training state; a run resumed from it saves its result at once.
        output: the output to pass when resuming; None if it is the same as before.
    """

    def __init__(self, message: str, kept: str, output: str | None = None) -> None:
        super().__init__(message)
        self.kept, self.output = kept, output


class TrainingError(LinearizeError):
    """Training had to stop; the message says where, and what was kept."""


def interrupted_run(folder: object) -> ConfigError:
    """Return the error for starting again in a folder that holds an interrupted run."""
    return ConfigError(
        f"{str(folder)!r} holds an interrupted run; continue with --resume, or start again with --overwrite"
    )


def suggestion(got: str, known: Iterable[str], form: str = "{!r}") -> str:
    """Return a sentence that names the nearest known name; empty if none is near."""
    near = get_close_matches(str(got), list(known), n=1, cutoff=0.5)
    return f" Did you mean {form.format(*near)}?" if near else ""


def unknown_name(kind: str, got: str, known: Iterable[str]) -> UnknownNameError:
    """Build the error for an unknown name, with the nearest known one and the whole list."""
    names = sorted(known)
    return UnknownNameError(f"unknown {kind} {got!r}.{suggestion(got, names)} Known: {', '.join(names) or 'none'}.")
