"""kill -9 before every change of the disk: what a random moment hits once in a hundred runs is always met here.

Python's audit events say what is about to be written, renamed or removed; the process kills itself there. Then the run
goes on with --resume and ends as an undisturbed one does. Of changes of one kind in one folder (the copies of thirty
source files) only the first two count.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from faults.test_kills import MORE, RESUMES, same, whole
from support.command_lines import line_of
from support.forks import run

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")


def counting(words, place, limit, counter):
    """Run a command line, and die before the change number `limit` of what lies below `place`."""
    seen = 0
    last, alike = None, 0

    def watch(event, arguments):
        nonlocal seen, last, alike
        if event == "open":
            path, _, flags = arguments
            if not flags & (os.O_WRONLY | os.O_RDWR):
                return
        elif event in CHANGES:
            path = arguments[0]
        else:
            return
        # A name without a folder is that of a file in a folder that is being removed.
        if isinstance(path, int) or not (os.fspath(path).startswith(place) or not os.path.isabs(path)):
            return
        change = (event, os.path.dirname(path), os.path.splitext(path)[1])
        last, alike = change, alike + 1 if change == last else 1
        seen += alike <= 2
        if alike <= 2 and seen == limit:
            os.kill(os.getpid(), signal.SIGKILL)

    from linearize.cli import main

    sys.addaudithook(watch)
    code = main(words)
    Path(counter).write_text(str(seen))
    sys.exit(code)


def lines(verb, models, out):
    words = line_of(verb, models, out, *MORE.get(verb, []))
    return words, [*words, "--resume"]


def try_every_point(verb, models, tmp_path):
    """Kill at every point, resume, and compare with an undisturbed run."""
    there, count = tmp_path / "whole", tmp_path / "count"
    place = str(tmp_path / "work")
    out = tmp_path / "work" / "out"
    out.parent.mkdir()
    done = run(counting, lines(verb, models, there)[0], str(tmp_path / "nowhere"), 0, str(count))
    assert done.returncode == 0, done.stderr
    done = run(counting, lines(verb, models, out)[0], place, 0, str(count))
    assert done.returncode == 0, done.stderr
    points = int(count.read_text())
    for point in range(1, points + 1):
        shutil.rmtree(out.parent)
        out.parent.mkdir()
        first, again = lines(verb, models, out)
        done = run(counting, first, place, point, str(count))
        assert done.returncode == -signal.SIGKILL, (point, done.stderr)
        whole(verb, out, models)
        done = run(counting, again, place, 0, str(count))
        assert done.returncode == 0, (point, done.stderr)
        try:
            same(verb, there, out)
        except AssertionError as error:
            raise AssertionError(f"killed before change {point} of {points}") from error
        assert [path.name for path in out.parent.iterdir()] == ["out"], point


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verb", RESUMES)
def test_a_kill_before_every_change(verb, models, tmp_path):
    try_every_point(verb, models, tmp_path)
