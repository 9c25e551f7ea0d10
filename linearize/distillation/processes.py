"""Several processes, as `accelerate launch` and `torchrun` start them: which one this is, and how it waits."""

from __future__ import annotations

import os


def several() -> bool:
    """Tell whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main() -> bool:
    """Tell whether this is the process that prints and writes; a single one is."""
    return not several() or os.environ.get("RANK", "0") == "0"


def wait_for_all() -> None:
    """Wait until every process is here."""
    if several():
        from accelerate import PartialState

        PartialState().wait_for_everyone()
