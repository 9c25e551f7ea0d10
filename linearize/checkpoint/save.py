"""Save a converted model: everything is written beside the target and renamed when complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from linearize.checkpoint.card import base_facts, model_card
from linearize.errors import CheckpointError
from linearize.modeling.model import is_linearized


def check_target(target: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Refuse a folder that cannot become the output, before any work is done.

    Raises:
        CheckpointError: if it is a file, holds something and `overwrite` is false, or cannot be written.
    """
    path = Path(target).absolute()
    if path.is_file():
        raise CheckpointError(f"output {str(target)!r} is a file, expected a folder; choose another name")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise CheckpointError(
            f"output {str(target)!r} exists and is not empty; choose another folder or pass --overwrite"
        )
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise CheckpointError(f"output {str(target)!r}: {str(parent)!r} cannot be written to; choose another folder")
    return path


@contextlib.contextmanager
def atomic_folder(target: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Give a fresh folder beside `target` that takes its name when the block ends well, and vanishes otherwise.

    A kill between the two renames of an overwrite leaves the old folder under a name that begins with `.old-`.

    Raises:
        CheckpointError: if the target cannot be used, or the disk is full.
    """
    path = check_target(target, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(4)
    fresh = path.with_name(f".new-{path.name}-{token}")
    try:
        fresh.mkdir()
        yield fresh
        _sync(fresh)
        if path.exists():
            old = path.with_name(f".old-{path.name}-{token}")
            path.rename(old)
            fresh.rename(path)
            shutil.rmtree(old)
        else:
            fresh.rename(path)
    except OSError as error:
        raise CheckpointError(
            f"could not write {str(target)!r} ({error.strerror or error}); nothing was left under that name: "
            "make room or choose another folder"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Have the files on disk before the folder gets its name."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())


def save(
    model: PreTrainedModel,
    target: str | os.PathLike[str],
    *,
    processor: Any = None,
    overwrite: bool = False,
    provenance: dict[str, Any] | None = None,
    extra_files: Mapping[str, str | bytes] | None = None,
    **kwargs: Any,
) -> Path:
    """Save a converted model with its tokenizer or image processor, a model card and its own code, all or nothing.

    Args:
        model: a converted model.
        target: folder to make.
        processor: tokenizer, image processor or feature extractor, or several in a list; saved along.
        overwrite: whether a folder that holds something may be replaced.
        provenance: how the model was made, as plain data; kept in config.json.
        extra_files: further files of the folder, texts or bytes by name, which may lead into folders.
        **kwargs: for `save_pretrained` (`max_shard_size` ...).

    Returns:
        The folder.

    Raises:
        CheckpointError: if the folder cannot be used or written; nothing is left under its name then.
    """
    if not is_linearized(model):
        raise CheckpointError(f"{type(model).__name__} is not converted; convert it first, or use its save_pretrained")
    processors = processor if isinstance(processor, (list, tuple)) else [processor]
    if provenance is not None:
        model.config.linearize = {**model.config.linearize, "provenance": provenance}
    card = model_card(model, facts=base_facts(str(model.config.name_or_path or "")))
    with atomic_folder(target, overwrite=overwrite) as folder:
        model.save_pretrained(folder, **kwargs)
        (folder / "README.md").write_text(card, encoding="utf-8")
        for name, text in (extra_files or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode("utf-8") if isinstance(text, str) else text)
        for one in processors:
            if one is not None:
                one.save_pretrained(folder)
    return Path(target)
