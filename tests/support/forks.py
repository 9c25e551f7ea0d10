"""Processes of their own without the seconds that importing torch takes: forks of one process that has imported it.

For what needs another process, and not a fresh interpreter: several processes of one training, runs that are killed,
programs with their own environment. The process that they are forks of starts with the first of them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        *("torch", "transformers", "accelerate", "datasets", "sklearn.metrics"),
        *("transformers.models.auto.processing_auto", "transformers.models.auto.image_processing_auto", "scipy.io"),
        *("transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama"),
        *("linearize.cli.train", "linearize.jobs.convert", "linearize.jobs.finetune"),
    ]
)


@dataclass(frozen=True)
class Done:
    """How a program ended, as `subprocess.CompletedProcess` says it."""

    returncode: int
    stdout: str
    stderr: str


def start(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None, said: Path):
    """Start a function in a fork; its stdout and stderr go into files in the folder `said`."""
    said.mkdir(parents=True, exist_ok=True)
    child = context.Process(target=_child, args=(function, arguments, dict(environment or {}), str(said)))
    child.start()
    return child


def settle() -> None:
    """Leave what was imported out of searches for garbage, which come seldom, and wait for no disk.

    No file of a test outlives the machine, so a sync only checks the descriptor. Searches as often as usual take a
    twelfth of the time of tests.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    os.fsync = os.fstat


def _child(function: Callable[..., Any], arguments: Sequence[Any], environment: dict[str, str], said: str) -> None:
    settle()
    os.environ.update(environment)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(os.path.join(said, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    try:
        function(*arguments)
        code: Any = 0
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def run(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None) -> Done:
    """Run a function in a fork to its end."""
    with tempfile.TemporaryDirectory() as folder:
        child = start(function, *arguments, environment=environment, said=Path(folder))
        child.join()
        said = [(Path(folder) / name).read_text() for name in ("stdout", "stderr")]
        return Done(child.exitcode, *said)


def python(code: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Done:
    """Run Python code in a fork, as `python -c` does; torch and transformers have been imported there."""
    return run(_execute, code, [str(argument) for argument in arguments], environment=environment)


def _execute(code: str, arguments: list[str]) -> None:
    sys.argv = ["-c", *arguments]
    exec(compile(code, "-c", "exec"), {"__name__": "__main__"})


def together(
    function: Callable[..., Any], *arguments: Any, count: int = 2, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Run a function in several forks that find each other as processes of torchrun do.

    Returns:
        What each of them printed on stdout.

    Raises:
        AssertionError: with what they said, if one fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} | {**(environment or {})}
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            said = Path(folder) / str(rank)
            children.append(start(function, *arguments, environment=shared | own, said=said))
        for child in children:
            child.join()
        out, errors = (
            [(Path(folder) / str(r) / name).read_text() for r in range(count)] for name in ("stdout", "stderr")
        )
        if any(child.exitcode for child in children):
            texts = (f"process {rank} said:\n{text[-4000:]}" for rank, text in enumerate(errors))
            raise AssertionError("\n".join(texts))
        return out


def in_place_of_interpreter(
    command: Sequence[str], *, input: bytes, env: Mapping[str, str], **_: Any
) -> subprocess.CompletedProcess[bytes]:
    """Replace `subprocess.run` of `python -P -c CODE` with bytes for its stdin: the same code, in a fork."""
    code = "import io, sys; sys.stdin = io.TextIOWrapper(io.BytesIO(bytes.fromhex(sys.argv.pop())))\n" + command[-1]
    done = python(code, input.hex(), environment=env)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.encode(), done.stderr.encode())


def in_forked_process(suite: Any, variant: str, tokens: int) -> int:
    """Replace `linearize.evaluation.bench.memory.in_fresh_process`: the same call, in a fork."""
    done = run(_answer, suite, variant, tokens)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def _answer(*what: Any) -> None:
    from linearize.evaluation.bench.memory import added_memory

    print(added_memory(*what))
