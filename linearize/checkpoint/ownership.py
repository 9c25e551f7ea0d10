"""Ownership of folders: only those that linearize wrote, and that hold nothing else, may be replaced or removed.

A finished folder has a marker: a random mark, and the names and sizes of its files. A file that is not on that list, or
has another size, is the user's.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from linearize.core.errors import CheckpointError, some
from linearize.core.parsing import MOST_TEXT, read_json, spare_name
from linearize.core.registry import Values

MARKER = ".linearize.json"
"""The marker of a finished folder: `written_by`, `mark` and `files`, sizes in bytes by name."""
TOLERATED = re.compile(r"(.*/)?(\.DS_Store|Thumbs\.db|desktop\.ini)|\.cache/huggingface/.*|.*__pycache__/[^/]*\.pyc")
"""Files that file managers, the Hub's client and Python leave in a folder, and that may be removed with it."""
TRANSFORMERS = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|preprocessor_config"
    r"|image_processor_config|processor_config|feature_extractor_config|chat_template|finetuning|stage)\.json"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|README\.md|log\.jsonl|\.gitattributes"
    r"|vocab\.txt|merges\.txt|[\w.-]*\.model|chat_template\.jinja|(linearize|modeling_linearize)\w*\.py"
)
"""Files of a checkpoint, not counting those in subfolders."""
DISCARDED = re.compile(r"^\.new-(.+)-[0-9a-f]{8}$")
"""Name of a folder that `discard` is removing."""


def mark(folder: Path) -> None:
    """Write the marker into a finished folder."""
    files = {name: size for name, size in sorted(files_below(folder).items()) if name != MARKER}
    _write_marker(folder, {"written_by": "linearize", "mark": secrets.token_hex(16), "files": files})


def _write_marker(folder: Path, values: Mapping[str, object]) -> None:
    temporary = spare_name(folder / MARKER)
    temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / MARKER)


def check_ours(folder: Path, shown: str) -> None:
    """Refuse to replace a folder that linearize did not write, or that holds something else.

    Args:
        folder: an existing folder.
        shown: its name as the user gave it.

    Raises:
        CheckpointError: naming a file that is not ours.
    """
    listed = _listed(folder)
    names = _foreign(folder, listed or {})
    if not names:
        return
    if listed is not None:
        why = f"holds {some(names)}, which linearize did not write, or which has changed since"
        advice = "move that elsewhere, or choose another folder"
    elif (folder / MARKER).is_file() or read_mapping(folder / "config.json").get("model_type") == "linearize":
        why = "does not list the sizes of its files (earlier versions did not)"
        advice = "remove it yourself, or choose another folder"
    else:
        why, advice = f"was not written by linearize (it holds {names[0]!r})", "choose another folder"
    raise CheckpointError(f"output {shown!r} {why}, so --overwrite does not replace it; {advice}")


def _listed(folder: Path) -> dict[str, int] | None:
    """Return the sizes of the files that a marker lists; None without a marker of ours."""
    values = read_mapping(folder / MARKER)
    files = values.get("files")
    marked = values.get("written_by") == "linearize" and re.fullmatch("[0-9a-f]{32}", str(values.get("mark")))
    return files if marked and isinstance(files, dict) else None


def _foreign(folder: Path, listed: Mapping[str, int]) -> list[str]:
    """Return the files that are not listed, or have another size than listed."""
    sizes = files_below(folder)
    if listed:
        sizes.pop(MARKER, None)
    unlisted = (name for name, size in sizes.items() if size is None or listed.get(name) != size)
    return sorted(name for name in unlisted if not TOLERATED.fullmatch(name))


def files_below(folder: Path) -> dict[str, int | None]:
    """Return the sizes of all files below a folder; None for links, which are not followed."""
    sizes: dict[str, int | None] = {}
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            sizes |= {f"{path.name}/{name}": size for name, size in files_below(path).items()}
        else:
            sizes[path.name] = None if path.is_symlink() else path.stat().st_size
    return sizes


def replace_listed(folder: Path, name: str, text: str) -> None:
    """Replace a text file of a finished folder atomically, and update its size in the marker.

    Raises:
        OSError: if it cannot be written.
    """
    file, marker = folder / name, read_mapping(folder / MARKER)
    listed = _listed(folder)
    temporary = spare_name(file)
    try:
        temporary.write_text(text, encoding="utf-8")
        size = temporary.stat().st_size
        if listed is not None and listed.get(name) == file.stat().st_size:
            _write_marker(folder, {**marker, "files": {**listed, name: size}})
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def remove_weights(folder: Path) -> None:
    """Remove the weights of a finished folder that its marker lists."""
    sizes = files_below(folder)
    for name, size in (_listed(folder) or {}).items():
        if name.endswith(".safetensors") and sizes.get(name) == size:
            (folder / name).unlink()


def has_weights(folder: Path) -> bool:
    """Tell whether a finished folder still has all weights that its marker lists."""
    listed = _listed(folder) or {}
    return all((folder / name).is_file() for name in listed if name.endswith(".safetensors"))


def check_links(name: str | os.PathLike[str]) -> None:
    """Refuse a checkpoint with a link that leads out of it: it could make us copy any of the user's files.

    Links in the Hub's cache lead from `models--ORG--NAME/snapshots/COMMIT` to `models--ORG--NAME/blobs`.

    Args:
        name: a folder; any other name, such as a Hub name, passes.

    Raises:
        CheckpointError: naming the link.
    """
    root = os.path.realpath(os.path.expanduser(name))
    allowed = [os.path.join(root, "")]
    repository, _, commit = root.rpartition(f"{os.sep}snapshots{os.sep}")
    if commit and os.path.basename(repository).startswith("models--"):
        allowed.append(os.path.join(repository, "blobs", ""))
    for folder, folders, files in os.walk(root):
        for file in (*folders, *files):
            path = os.path.join(folder, file)
            target = os.path.realpath(path)
            if os.path.islink(path) and not os.path.join(target, "").startswith(tuple(allowed)):
                raise CheckpointError(
                    f"{os.fspath(name)!r} holds {os.path.relpath(path, root)!r}, a link to {target!r} outside the "
                    "checkpoint, expected files; put a copy in its place if you trust the author of the checkpoint"
                )
        folders[:] = [name for name in folders if not name.startswith(".")]


def read_mapping(path: Path) -> Values:
    """Return the mapping in a JSON file; {} if the file cannot be read or holds something else."""
    try:
        values = read_json(path, MOST_TEXT)
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def discard(folder: Path) -> None:
    """Remove a folder of ours; if killed meanwhile, either all of it or nothing is left under its name."""
    unwanted = folder
    if not DISCARDED.match(folder.name):
        unwanted = spare_name(folder)
        folder.rename(unwanted)
    shutil.rmtree(unwanted)


def remove_parts(
    folder: Path,
    parts: re.Pattern[str],
    what: str,
    *,
    record: str | None = None,
    unmarked: Callable[[Path], bool] = lambda folder: False,
    check_only: bool = False,
) -> None:
    """Remove a working folder of ours: the entries whose names match, then the folder itself.

    Args:
        folder: may be missing.
        parts: pattern of the names directly below it.
        what: what the folder should be, for the message.
        record: file with the fingerprint of our run, which makes the folder ours; None if its folders have markers.
        unmarked: tells whether a folder in it without a marker is ours.
        check_only: whether to check only, and remove nothing.

    Raises:
        CheckpointError: if it holds anything else, or is a link or a file; nothing is removed then.
    """
    if not folder.is_symlink() and not folder.exists():
        return
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError(f"{str(folder)!r} is where {what} would be; move it, or choose another output")
    entries = sorted(folder.iterdir())
    known = record is None or is_run(folder / record)
    # A killed process may leave a partial record and nothing else.
    ours = [path for path in entries if path.name == f".{record}" or (known and is_part(path, parts, unmarked))]
    foreign = [path.name for path in entries if path not in ours and not TOLERATED.fullmatch(path.name)]
    if foreign:
        raise CheckpointError(
            f"{str(folder)!r} holds {some(foreign)}, which is not part of {what}, so it is not removed; "
            "move that elsewhere, or choose another output"
        )
    if check_only:
        return
    # The record is removed last: without it the rest would not be recognised as ours.
    for path in sorted(entries, key=lambda path: path.name == record):
        if path.is_dir() and not path.is_symlink():
            discard(path)
        else:
            path.unlink()
    folder.rmdir()


def is_part(path: Path, parts: re.Pattern[str], unmarked: Callable[[Path], bool] = lambda folder: False) -> bool:
    """Tell whether an entry of a working folder is ours, by its name and contents; arguments as in `remove_parts`."""
    # A folder that `discard` was removing counts under its original name.
    if path.is_symlink() or not parts.fullmatch(DISCARDED.sub(r"\1", path.name)):
        return False
    if not path.is_dir() or path.name.startswith("."):
        return True
    listed = _listed(path)
    return not _foreign(path, listed or {}) or (listed is None and unmarked(path))


def holds_only(folder: Path, names: re.Pattern[str]) -> bool:
    """Tell whether all files of a folder have names that match."""
    return all(names.fullmatch(name) for name in files_below(folder))


def is_run(record: Path) -> bool:
    """Tell whether a file is the fingerprint of a run of ours (`linearize.checkpoint.fingerprint`)."""
    values = read_mapping(record)
    fingerprint = values.get("fingerprint", values)
    return isinstance(fingerprint, dict) and "data contents" in fingerprint
