"""Whose is a folder? Only what linearize wrote, and what holds nothing else, may ever be replaced or removed."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linearize.errors import CheckpointError

MARKER = ".linearize.json"
"""The file that a finished folder has of us: the names of all the files that were written into it."""
TOLERATED = re.compile(r"(.*/)?(\.DS_Store|Thumbs\.db|desktop\.ini)|\.cache/huggingface/.*|.*__pycache__/[^/]*\.pyc")
"""What file managers, the Hub's client and Python leave in a folder; nobody misses it."""
TRANSFORMERS = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|preprocessor_config"
    r"|image_processor_config|processor_config|feature_extractor_config|chat_template|finetuning|stage)\.json"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|README\.md|log\.jsonl|\.gitattributes"
    r"|vocab\.txt|merges\.txt|[\w.-]*\.model|chat_template\.jinja|(linearize|modeling_linearize)\w*\.py"
)


DISCARDED = re.compile(r"^\.new-(.+)-[0-9a-f]{8}$")
"""The name of a folder that is being removed, see `discard`."""


@dataclass(frozen=True)
class Kind:
    """A kind of folder that linearize writes, and knows again without a marker: states, and what older versions wrote.

    Attributes:
        known_by: files that are all there.
        holds: pattern of the paths of its files.
        sure: a further look at the folder.
    """

    known_by: tuple[str, ...]
    holds: re.Pattern[str]
    sure: Callable[[Path], bool] = lambda folder: True


def _converted(folder: Path) -> bool:
    values = _read(folder / "config.json")
    return values.get("model_type") == "linearize" and isinstance(values.get("linearize"), dict)


def _tuned(folder: Path) -> bool:
    return {"task", "metrics", "options"} <= _read(folder / "finetuning.json").keys()


KINDS = (
    Kind(("config.json",), TRANSFORMERS, _converted),
    Kind(("config.json", "finetuning.json"), TRANSFORMERS, _tuned),
    Kind(("index.html", "report.json"), re.compile(r"index\.html|report\.json|images/[\w.-]+\.png")),
    Kind(("comparison.png", "comparison.json"), re.compile(r"comparison\.(png|json)")),
    Kind(("state.json",), re.compile(r"state\.(json|safetensors)")),
)


def mark(folder: Path) -> None:
    """Write the marker into a finished folder."""
    files = sorted(name for name in _files(folder) if name != MARKER)
    text = json.dumps({"written_by": "linearize", "files": files}, indent=1) + "\n"
    (folder / MARKER).write_text(text, encoding="utf-8")


def check_ours(folder: Path, shown: str, what: str = "output") -> None:
    """Refuse to replace a folder that linearize did not write, or that holds something else.

    Args:
        folder: an existing folder.
        shown: its name as the user gave it.
        what: what it is to the user.

    Raises:
        CheckpointError: naming a file that is not ours.
    """
    files = list(_files(folder))
    ours = _ours(folder)
    strange = sorted(name for name in files if ours is None or not (ours(name) or TOLERATED.fullmatch(name)))
    if ours is None and strange:
        raise CheckpointError(
            f"{what} {shown!r} is no folder that linearize wrote (it holds {strange[0]!r}), so --overwrite does not "
            "replace it; choose another folder"
        )
    if strange:
        raise CheckpointError(
            f"{what} {shown!r} holds {strange[0]!r}{_more(strange)}, which linearize did not write, so --overwrite "
            "does not replace it; move that elsewhere, or choose another folder"
        )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _ours(folder: Path) -> Callable[[str], object] | None:
    """Return what tells our files by their paths, or None where the folder is not known as ours."""
    marked = _read(folder / MARKER)
    if marked.get("written_by") == "linearize" and isinstance(marked.get("files"), list):
        names = {MARKER, *map(str, marked["files"])}
        return names.__contains__
    for kind in KINDS:
        if all((folder / name).is_file() for name in kind.known_by) and kind.sure(folder):
            return kind.holds.fullmatch
    return None


def _files(folder: Path) -> Iterator[str]:
    """Give the paths of all files below a folder, links among them, with forward slashes; links are not followed."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from (f"{path.name}/{name}" for name in _files(path))
        else:
            yield path.name


def check_links(name: str | os.PathLike[str]) -> None:
    """Refuse a checkpoint with a link that leads out of it: whoever made it could have any file of the user's copied.

    Links in the Hub's cache lead from `models--ORG--NAME/snapshots/COMMIT` to `models--ORG--NAME/blobs`.

    Args:
        name: a folder; the name of anything else, such as a Hub name, is passed over.

    Raises:
        CheckpointError: naming a link that leads elsewhere.
    """
    root = os.path.realpath(os.path.expanduser(name))
    allowed = [root]
    repository, _, commit = root.rpartition(f"{os.sep}snapshots{os.sep}")
    if commit and os.path.basename(repository).startswith("models--"):
        allowed.append(os.path.join(repository, "blobs"))
    for folder, folders, files in os.walk(root):
        for file in (*folders, *files):
            path = os.path.join(folder, file)
            target = os.path.realpath(path)
            inside = any(os.path.join(target, "").startswith(os.path.join(one, "")) for one in allowed)
            if os.path.islink(path) and not inside:
                raise CheckpointError(
                    f"{os.fspath(name)!r} holds {os.path.relpath(path, root)!r}, a link to {target!r} outside the "
                    "checkpoint, expected files; put a copy in its place if you trust whoever made the checkpoint"
                )
        folders[:] = [one for one in folders if not one.startswith(".")]


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def spare_name(path: Path) -> Path:
    """Return a name beside a path under which nothing is kept: what a killed process leaves there is cleared."""
    return path.with_name(f".new-{path.name}-{secrets.token_hex(4)}")


def discard(folder: Path) -> None:
    """Remove a folder of ours: a kill leaves the whole of it under its name, or nothing."""
    unwanted = folder
    if not DISCARDED.match(folder.name):
        unwanted = spare_name(folder)
        folder.rename(unwanted)
    shutil.rmtree(unwanted)


def remove_parts(folder: Path, parts: re.Pattern[str], what: str, *, check_only: bool = False) -> None:
    """Remove a working folder of ours: the entries whose names match, and the folder itself.

    Args:
        folder: may be missing.
        parts: pattern of the names right below it.
        what: what the folder should be, for the message.
        check_only: look only.

    Raises:
        CheckpointError: if it holds anything else, or is a link or a file; nothing is removed then.
    """
    if not folder.is_symlink() and not folder.exists():
        return
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError(f"{str(folder)!r} lies where {what} would; move it, or choose another output")
    entries = sorted(folder.iterdir())
    # What `discard` was removing counts by the name that it had.
    names = {path.name: DISCARDED.sub(r"\1", path.name) for path in entries}
    strange = [name for name, was in names.items() if not parts.fullmatch(was) and not TOLERATED.fullmatch(name)]
    if strange:
        raise CheckpointError(
            f"{str(folder)!r} holds {strange[0]!r}{_more(strange)}, which is no part of {what}, so it is not removed; "
            "move that elsewhere, or choose another output"
        )
    if check_only:
        return
    for path in entries:
        if path.is_dir() and not path.is_symlink():
            discard(path)
        else:
            path.unlink()
    folder.rmdir()
