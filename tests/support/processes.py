"""Processes: several as torchrun starts them, what a child said when it fails, a Python without linearize."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

TESTS = str(Path(__file__).parents[1])


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a child: offline, one thread, on the CPU, and able to import `support`."""
    path = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": path}
    return os.environ | fixed | more


def launch(words: Sequence[object], count: int, logs: Path) -> str:
    """Run a program once, or as `count` processes that find each other on a free port of the system's choice.

    Args:
        words: the program and its arguments.
        count: number of processes.
        logs: folder to make for what the processes print.

    Returns:
        What the (first) process printed on stdout.
    """
    front: list[object] = []
    if count > 1:
        front = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
        front += ["--nproc_per_node", count, "--log_dir", logs, "--redirects", 3]
    line = [str(word) for word in [*front, *words]]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    said = {path.parent.name: path.read_text() for path in sorted(logs.rglob("stderr.log"))}
    if done.returncode:
        # The launcher's own traceback says only that a child failed.
        children = "\n".join(f"process {rank} said:\n{text[-4000:]}" for rank, text in said.items())
        raise AssertionError(f"exit code {done.returncode}\n{children or done.stderr[-4000:]}")
    if count == 1:
        return done.stdout
    (first,) = (path for path in logs.rglob("stdout.log") if path.parent.name == "0")
    return first.read_text()


def bare_python(root: Path) -> Path:
    """Make a virtual environment without linearize, which sees this one's other packages, and return its Python."""
    venv.create(root, symlinks=True, with_pip=False)
    (site,) = root.glob("lib/python*/site-packages")
    # Packages are found there, but its own .pth files (an editable linearize) are not read.
    (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return root / "bin" / "python"
