"""What a verb of the command line is, and the options that several verbs have."""

from __future__ import annotations

import argparse
from typing import ClassVar

FLAGS = {
    "--dry-run": "check everything, time a few steps, print what it would cost (time, memory, room), and write nothing",
    "--no-native": "neither compile nor use the native op for the CPU, as LINEARIZE_NATIVE=0 (see `linearize native`)",
    "--explain-backend": "print which backend computes each layer's attention, and why those tried before it declined",
    "--json": "print the result as JSON on stdout",
}
"""Options without a value that several verbs have."""
Groups = dict[str, argparse._ActionsContainer]


def add_flags(parser: argparse._ActionsContainer, *flags: str) -> None:
    """Declare some of `FLAGS`."""
    for flag in flags:
        parser.add_argument(flag, action="store_true", help=FLAGS[flag])


class Verb:
    """A verb. The docstring of a subclass is its help: a sentence, then examples and notes.

    Attributes:
        summary: its line in the overview.
        module: the module of `linearize.cli` whose function of the verb's name runs it, with the job (if there is one)
            and the parsed arguments.
        job: the config whose fields are its options.
        flags: those of `FLAGS` that it has.
        output: default of `--output`, for verbs whose config does not have it.
    """

    summary: ClassVar[str]
    module: ClassVar[str]
    job: ClassVar[type | None] = None
    flags: ClassVar[tuple[str, ...]] = ("--json",)
    output: ClassVar[str] = ""

    @staticmethod
    def declare(parser: argparse.ArgumentParser, groups: Groups) -> None:
        """Declare further options; `groups` are those of the config, by title."""
