"""Modules of a sentence-transformers folder (pooling, normalisation, dense layers), which a checkpoint keeps.

`SentenceTransformer(FOLDER)` reads them from `modules.json`; without it, it would pool by the mean and not normalise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from linearize.core.errors import CheckpointError
from linearize.core.parsing import parse_json

MODULES, TRANSFORMER = "modules.json", "sentence_bert_config.json"
OWN = ("config_sentence_transformers.json", TRANSFORMER)
NAME = re.compile(r"\w[\w.+ -]{0,99}")
"""A folder's name in the path of a module: `.` would put its config.json in the place of the model's own."""
PARTS = ("config.json", "model.safetensors")
"""Files that a module may have; weights as pickles are refused."""


def sentence_files(name: str, revision: str | None = None) -> dict[str, bytes]:
    """Return the files that make a checkpoint a sentence embedder; empty if it is no embedder.

    Args:
        name: folder, whose links were checked (`linearize.checkpoint.ownership.check_links`), or Hub name.
        revision: branch, tag or commit on the Hub.

    Returns:
        Contents by name within the folder, such as `1_Pooling/config.json`.

    Raises:
        CheckpointError: if the list of modules cannot be read or leads out of the folder, or a module's weights are a
            pickle.
    """
    content = _read(name, MODULES, revision)
    if content is None:
        return {}
    modules = _parse(name, MODULES, content)
    if not isinstance(modules, list) or not all(isinstance(module, dict) and "path" in module for module in modules):
        raise CheckpointError(f"{name!r}: {MODULES} is no list of modules with paths; download the checkpoint again")
    paths = [str(module["path"]) for module in modules]
    files = {MODULES: content}
    for file in OWN:
        text = _read(name, file, revision)
        if text is not None:
            values = _parse(name, file, text)
            if not isinstance(values, dict):
                raise CheckpointError(
                    f"{name!r}: {file} holds a {type(values).__name__}, expected an object; download it again"
                )
            files[file] = text
    for path in filter(None, paths):
        if len(path) > 200 or not all(NAME.fullmatch(part) for part in path.split("/")):
            shown = path if len(path) <= 40 else f"{path[:40]}..."
            raise CheckpointError(
                f"{name!r}: {MODULES} names {shown!r}, expected a folder inside the checkpoint such as '1_Pooling'; "
                "repair it"
            )
        parts = {f"{path}/{file}": _read(name, f"{path}/{file}", revision) for file in PARTS}
        if parts[f"{path}/{PARTS[1]}"] is None and _read(name, f"{path}/pytorch_model.bin", revision) is not None:
            raise CheckpointError(
                f"{name!r}: module {path!r} has its weights as a pickle; save it again with sentence-transformers, "
                "which writes safetensors"
            )
        files |= {file: text for file, text in parts.items() if text is not None}
    return files


def with_length(files: Mapping[str, bytes], tokens: int | None) -> dict[str, bytes]:
    """Return the files with another longest input, in tokens; None: unchanged."""
    if tokens is None or not files:
        return dict(files)
    values = parse_json(files.get(TRANSFORMER, b"{}"))
    return {**files, TRANSFORMER: json.dumps({**values, "max_seq_length": tokens}, indent=2).encode()}


def pools_first(files: Mapping[str, bytes]) -> bool:
    """Tell whether the embedding is the first token's state, not the mean over all tokens."""
    for name, content in files.items():
        if name.endswith("/config.json"):
            try:
                values: object = parse_json(content)
            except ValueError:
                continue
            if isinstance(values, dict) and (
                values.get("pooling_mode_cls_token") or values.get("pooling_mode") == "cls"
            ):
                return True
    return False


def _parse(name: str, file: str, content: bytes) -> object:
    try:
        return parse_json(content)
    except ValueError as error:
        raise CheckpointError(
            f"{name!r}: {file} cannot be read as JSON ({error}); download the checkpoint again"
        ) from None


def _read(name: str, file: str, revision: str | None) -> bytes | None:
    folder = Path(name).expanduser()
    if folder.is_dir():
        path = folder / file
        return path.read_bytes() if path.is_file() else None
    from transformers.utils import cached_file

    try:
        cached = cached_file(
            name,
            file,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
    except (OSError, ValueError):
        return None
    return None if cached is None else Path(cached).read_bytes()
