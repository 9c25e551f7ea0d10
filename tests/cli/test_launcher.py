"""Workers end with their launcher, also if it is killed and can tell them nothing."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import time

import pytest
from support import forks

from linearize.cli import main as run


def launch(pipe):
    """Start a worker as torchrun does, with a verb that never ends, and wait for it."""
    if os.fork() == 0:
        entry = importlib.import_module("linearize.cli.main")
        ready = os.open(pipe, os.O_WRONLY)
        entry.WATCH = 0.02
        entry._dispatch = lambda arguments: (os.write(ready, f"{os.getpid():08}".encode()), time.sleep(60))
        sys.argv = ["linearize", "distill", "model"]
        run()
    time.sleep(60)


@pytest.mark.parametrize("launched", [True, False])
def test_a_killed_launcher_takes_its_workers_along(launched, tmp_path):
    """They trained on, and held their devices, until somebody ended each of them by hand."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    environment = {"WORLD_SIZE": "2"} | ({"TORCHELASTIC_RUN_ID": "none"} if launched else {})
    child = forks.start(launch, str(pipe), environment=environment, said=tmp_path / "said")
    ends = os.open(pipe, os.O_RDONLY)
    worker = int(os.read(ends, 8))
    assert select.select([ends], [], [], 0.2)[0] == []
    child.kill()
    child.join()
    # The pipe ends with the process that holds its other end.
    ended = select.select([ends], [], [], 10 if launched else 0.3)[0] == [ends]
    if not ended:
        os.kill(worker, signal.SIGKILL)
    os.close(ends)
    assert ended == launched
