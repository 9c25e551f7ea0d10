"""Compile the native op, once per machine, into the user's cache folder, and compare it with the ops in PyTorch.

`linearize.attention.native.locate` finds it there. The library and its record are written to temporary files and
renamed, the record last. So two processes may build at the same time, and a killed one leaves nothing incomplete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from linearize.attention.call import AttentionCall
from linearize.attention.factory import build_mixer
from linearize.attention.mixer import Mixer
from linearize.attention.native import SWITCH, engine, forget, locate, switched
from linearize.attention.native.calls import Engine
from linearize.attention.native.locate import FAILED, cache_folder, objection, record_file, write_record
from linearize.attention.parts import default_scale
from linearize.attention.shape import HeadShape
from linearize.core.errors import ConfigError
from linearize.core.registry import PLAIN, Hybrid, kernel_info, kernel_infos, make_config
from linearize.kernels.base import FeatureMap

COMPILERS = ("cc", "gcc", "clang")
SECONDS = 300
"""Time limit of a compiler run, in seconds."""
BUILD_PREFIX = ".build-"
"""Prefix of the names of the build folders."""


def compiler() -> str | None:
    """Return the C compiler: the environment variable CC, or the first installed one of the usual names."""
    wanted = os.environ.get("CC")
    return shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, COMPILERS)), None)


def build() -> Path:
    """Compile the native op.

    Returns:
        The library, which is used from the next call on.

    Raises:
        ConfigError: if there is no C compiler, it fails, or other users can write the folder for the library.
    """
    path, program, why = record_file(), compiler(), hindrance()
    if path is None or program is None or why:
        raise ConfigError(f"native op: {why}; everything works without it")
    try:
        make_folder(path.parent)
        # Older than any build that may still run.
        _sweep(path.parent, older=4 * SECONDS)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=BUILD_PREFIX) as folder:
            compiled = Path(folder) / f"{path.stem}.so"
            if error := compile_library(program, compiled, locate.NATIVE_FLAGS):
                raise ConfigError(f"native op: {program} failed; everything works without it. Output: {error[-500:]}")
            entry = locate.describe(compiled)
            # Named by its content, so that simultaneous builds never mix up each other's library and record.
            entry["file"] = f"{path.stem}-{entry['sha256'][:16]}.so"
            os.chmod(compiled, 0o644)
            library = compiled.replace(path.parent / entry["file"])
            write_record(path, entry)
    except OSError as error:
        raise ConfigError(f"native op: {path.parent} cannot be written ({error.strerror or error})") from None
    forget()
    return library


def make_folder(path: Path) -> None:
    """Create a folder and its parents."""
    for folder in (*reversed(path.parents), path):
        # The XDG convention requires this mode; with parents=True it would depend on the umask.
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def _sweep(folder: Path, older: float) -> None:
    """Delete the folders of builds that started more than `older` seconds ago."""
    for left in folder.glob(f"{BUILD_PREFIX}*"):
        with contextlib.suppress(OSError):
            if not older or time.time() - left.stat().st_mtime > older:
                shutil.rmtree(left)


def compile_library(program: str, made: Path, processor_flags: tuple[str, ...], *, load: bool = True) -> str:
    """Compile the sources into the file `made`.

    Args:
        program: the compiler.
        made: library to write.
        processor_flags: flags for the target processor.
        load: whether to also load it, to check that it runs here.

    Returns:
        The error; empty on success.
    """
    source, unit, first = Path(__file__).parent / locate.SOURCES[0], made.with_suffix(".o"), ""
    # Use OpenMP's pragmas if the compiler supports them; the functions they call are in torch's own library.
    for extra in ((*processor_flags, "-fopenmp"), processor_flags):
        steps = (
            [program, *locate.FLAGS, *extra, "-c", str(source), "-o", str(unit)],
            # Link without -fopenmp, so that no second OpenMP library with its own threads is loaded.
            [program, "-shared", str(unit), "-lm", "-o", str(made)],
        )
        try:
            for command in steps:
                done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
                if done.returncode:
                    raise OSError(done.stderr.strip())
            if load:
                Engine(made)
            return ""
        except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
            made.unlink(missing_ok=True)
            first = first or str(error) or f"{program} failed without a message"
    return first


def worth_building() -> bool:
    """Tell whether the op should be compiled automatically: it is not built, and there is no obstacle."""
    return not os.environ.get(SWITCH) and engine() is None and not obstacle()


def hindrance() -> str:
    """Return why the op cannot be compiled here, or would not be loaded afterwards; empty if it can be."""
    path = record_file()
    if path is None:
        return "the user has no home folder; set XDG_CACHE_HOME to a folder for it"
    if compiler() is None:
        return f"no C compiler among {', '.join(COMPILERS)}; install gcc or clang, or set CC"
    try:
        folder = next(part for part in path.parents if part.exists())
        why = objection(folder) or ("" if os.access(folder, os.W_OK) else f"{folder} cannot be written")
    except OSError as error:
        why = f"{path.parent} cannot be read ({error.strerror})"
    return f"{why}; fix that, or set XDG_CACHE_HOME to another folder" if why else ""


def obstacle() -> str:
    """Return why the op is not compiled automatically although it is not built; empty if there is no obstacle.

    Also empty if the environment variable LINEARIZE_NATIVE is set: 0 means no native op, 1 the existing one.
    """
    if os.environ.get(SWITCH) or engine() is not None:
        return ""
    with contextlib.suppress(OSError):
        path = record_file()
        if path is not None and FAILED in locate.read_record(path):
            return "it failed before; linearize native --build tries again and says why"
    return hindrance()


def note_failure(error: Exception) -> None:
    """Record that compiling failed or gave wrong results, so that it is not tried again automatically."""
    path = record_file()
    if path is not None:
        # If the record cannot be written, the next attempt fails again.
        with contextlib.suppress(OSError):
            write_record(path, {FAILED: str(error)[:1000]})
    forget()


def remove() -> list[Path]:
    """Delete everything that was built, including for other versions and machines, and return the deleted paths."""
    folder = cache_folder()
    files = [] if folder is None else sorted((*folder.glob("native-*.so"), *folder.glob("native-*.json")))
    for file in files:
        file.unlink(missing_ok=True)
    if folder is not None:
        _sweep(folder, older=0.0)
    forget()
    return files


MOST = 1e-4
"""Largest difference, relative to the largest output, that rounding can explain."""

TOKENS, HEADS, KEY_HEADS, SIZE = 150, 4, 2, 48

WINDOW = Hybrid(window=64, sinks=4, exact_keys=8)
"""A softmax window, sinks and exact keys."""


class Agreement(NamedTuple):
    """One kernel in one direction.

    Attributes:
        kernel: its name.
        direction: "bidirectional", "causal" or "one token"; followed by ", window" if there is a window.
        error: largest difference over the largest output.
    """

    kernel: str
    direction: str
    error: float


def native_kernels() -> list[str]:
    """Return the kernels whose map the native op supports; kernels that need a window are left out."""
    none = FeatureMap.map_spec
    infos = (info for info in kernel_infos() if not info.needs_window)
    return [info.name for info in infos if getattr(info.build, "map_spec", none) is not none]


@torch.no_grad()
def agreement() -> list[Agreement]:
    """Compare outputs for random inputs, with padding and grouped heads, for every kernel that the op supports."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, HEADS, TOKENS, SIZE, generator=generator)
    k, v = (torch.randn(2, KEY_HEADS, TOKENS, SIZE, generator=generator) for _ in range(2))
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[1, 100:] = False
    call = AttentionCall(q, k, v, SIZE**-0.5)
    rows = []
    for name in native_kernels():
        info = kernel_info(name)
        for ending, added in (("", PLAIN), (", window", WINDOW)):
            hybrid = replace(added, scale=default_scale(info, make_config(info, {}), added.window))
            for causal in (False, True):
                mixer = build_mixer(name, {}, HeadShape(HEADS, KEY_HEADS, SIZE, SIZE, causal), hybrid)
                mixer.reset_parameters(torch.Generator().manual_seed(1))
                for parameter in mixer.parameters():
                    # Some parameters start at 0, where an error in their effect would not show.
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
                error = _error(mixer, replace(call, key_padding_mask=mask))
                rows.append(Agreement(name, ("causal" if causal else "bidirectional") + ending, error))
            rows.append(Agreement(name, "one token" + ending, _error(mixer, call, one_token=True)))
    return rows


def check_agreement(rows: list[Agreement]) -> None:
    """Check that the native op agrees with PyTorch.

    Raises:
        ConfigError: if it does not; the message names the kernel and the difference.
    """
    worst = max(rows, key=lambda row: row.error, default=None)
    if worst is not None and not worst.error <= MOST:
        raise ConfigError(
            f"native op: {worst.kernel}, {worst.direction}, differs by {worst.error:.1e} from the op in PyTorch, "
            f"expected at most {MOST:g}; do not use it here: linearize native --remove"
        )


def _error(mixer: Mixer, call: AttentionCall, one_token: bool = False) -> float:
    """Return the largest difference between the native op and PyTorch, relative to the largest output.

    With `one_token` the last token is decoded after all others.
    """
    outputs = []
    for native in (True, False):
        with switched(native):
            if one_token:
                _, state = mixer(replace(call.part(slice(0, -1)), needs_state=True))
                outputs.append(mixer(replace(call.part(slice(-1, None)), state=state, needs_state=True))[0])
            else:
                outputs.append(mixer(call)[0])
    ours, theirs = outputs
    if (mask := call.key_padding_mask) is not None:
        # Outputs at padding do not matter.
        ours, theirs = (x[mask[:, None].expand(-1, HEADS, -1)] for x in (ours, theirs))
    return float((ours - theirs).abs().max() / theirs.abs().max())
