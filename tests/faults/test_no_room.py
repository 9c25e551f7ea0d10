"""No room: a full disk and limits on the size of files end in one line, with nothing lost."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import sys
import time
import weakref

import pytest
from support.command_lines import line_of
from support.forks import run

VERBS = (
    "convert",
    "convert --save-every",
    "distill",
    "align",
    "finetune",
    "report",
    "compare",
    "init",
    "run",
)
LIMITS = (0, 1_000)


def limited(words, size):
    """Run a command line in which no file may be larger; its own output is kept in memory."""
    from linearize.cli import main

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            code = main(words)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    print(json.dumps([code, out.getvalue(), err.getvalue()]))


@pytest.mark.sampled("values")
@pytest.mark.parametrize("size", LIMITS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_limit_on_files_ends_in_one_line(verb, size, models, tmp_path):
    name, *more = verb.split()
    words = line_of(name, models, tmp_path / "out", *(["--save-every", 2] if more else []))
    done = run(limited, words, size)
    assert done.returncode == 0, done.stderr
    code, _, err = json.loads(done.stdout.splitlines()[-1])
    assert code == 2 and len(err.splitlines()) == 1 and err.startswith("linearize: error: "), err
    assert "File too large" in err or "write" in err, err
    assert not (tmp_path / "out" / "model.safetensors").exists()


def full_stdout():
    """Run a command line whose output goes to a full disk."""
    from linearize.cli import main

    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    sys.exit(main(["kernels"]))


def test_a_full_disk_under_the_output_is_one_line():
    done = run(full_stdout)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "linearize: error: cannot write ([Errno 28] No space left on device)" in done.stderr


def torch_on_a_full_disk():
    """Have torch's own error come up in the middle of a command."""
    import torch

    from linearize.cli import main

    sys.modules["linearize.cli.main"]._dispatch = lambda _: torch.save(torch.ones(100_000), "/dev/full")
    sys.exit(main(["kernels"]))


def test_torchs_error_of_a_full_disk_is_one_line():
    done = run(torch_on_a_full_disk)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "linearize: error: cannot write (" in done.stderr


def interrupted(moment):
    """Be interrupted where Python ignores it: in a callback, as those of imports are, or after the work."""
    from linearize.cli import main

    class Thing:
        pass

    def work(_):
        if moment == "callback":
            thing = Thing()
            _kept = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
            del thing
            # It comes from another thread, whenever that one runs.
            while True:
                time.sleep(0.01)
        return 0

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["linearize.cli.main"]._dispatch = work
    code = main()
    if moment == "end":
        signal.raise_signal(signal.SIGINT)
    sys.exit(code)


@pytest.mark.parametrize("moment", ["callback", "end"])
def test_ctrl_c_that_python_ignores_counts(moment):
    done = run(interrupted, moment)
    assert done.returncode == 130 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.strip().startswith("linearize: interrupted")
