"""Upload a checkpoint's folder to the Hub."""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import HfApi

# HTTPError belongs to the HTTP library of huggingface_hub, which has changed more than once.
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError

from linearize.checkpoint.loading import sentence_files
from linearize.checkpoint.ownership import (
    MARKER,
    TOLERATED,
    TRANSFORMERS,
    check_links,
    files_below,
    read_mapping,
    replace_listed,
)
from linearize.core.errors import CheckpointError, ConfigError, first_line, printable
from linearize.core.parsing import read_text

_REFUSED = (HTTPError, ConnectionError, TimeoutError, HfHubHTTPError, HFValidationError, LocalTokenNotFoundError)
OTHERS = re.compile(
    r"adapter/adapter_(config\.json|model\.safetensors)|additional_chat_templates/[\w.-]+\.jinja|[\w.-]+\.spm"
    r"|video_preprocessor_config\.json|normalizer\.json"
)
"""Files of checkpoints tuned with an adapter, and of rarer tokenizers and processors."""
_ANSWERS = {
    401: "the Hub does not know this token (401); run: hf auth login",
    403: "the token may not write there (403); use one with write access, or another USER",
    404: "there is no such user or organisation (404)",
}
_REPO = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def check_repo(repo_id: str) -> str:
    """Return a Hub name after checking its form.

    Raises:
        ConfigError: if it is not USER/NAME.
    """
    if not isinstance(repo_id, str) or not _REPO.fullmatch(repo_id):
        raise ConfigError(f"got Hub name {repo_id!r}, expected USER/NAME such as alice/bert-hedgehog")
    return repo_id


def files_to_push(folder: str | os.PathLike[str], include: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    """Return the files of a folder that `push` sends, and those that it leaves out.

    Args:
        folder: a folder that `save` wrote.
        include: patterns (`onnx/*`) of other paths in the folder to send too.

    Raises:
        ConfigError: if a pattern matches no file.
        CheckpointError: if the folder is not a checkpoint, or has a link that leads out of it.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{str(folder)!r} has no config.json, so it is not a checkpoint; convert a model first")
    check_links(path)
    modules = sentence_files(str(path))
    names = sorted(files_below(path))
    sent = {name for name in names if name in modules or TRANSFORMERS.fullmatch(name) or OTHERS.fullmatch(name)}
    for pattern in include:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise ConfigError(
                f"include: got {pattern!r}, which matches no file in {str(folder)!r}; expected a pattern such as onnx/*"
            )
        sent |= set(matches)
    left = [name for name in names if name not in sent and name != MARKER and not TOLERATED.fullmatch(name)]
    return sorted(sent), left


def push(folder: str | os.PathLike[str], repo_id: str, private: bool = False, *, include: Iterable[str] = ()) -> str:
    """Upload the files of a checkpoint (`files_to_push`) as one commit; make the repository if it is missing.

    huggingface_hub retries an upload whose connection breaks; files that are already on the Hub are not sent again. The
    token is its own (`hf auth login` or HF_TOKEN).

    Args:
        folder: a folder that `save` wrote.
        repo_id: USER/NAME.
        private: whether a new repository is private.
        include: patterns of further files to send.

    Returns:
        Address of the repository.

    Raises:
        ConfigError: if the name is not USER/NAME, or a pattern matches no file.
        CheckpointError: if the folder is not a checkpoint or has a link out of it, or the Hub refuses or cannot be
            reached; the local folder stays.
    """
    check_repo(repo_id)
    path = Path(folder)
    files, _ = files_to_push(folder, include)
    _name_card(path, repo_id)
    api = HfApi()
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            folder_path=path,
            commit_message=f"Upload a model {'converted' if is_converted(path) else 'saved'} with linearize",
            allow_patterns=[glob.escape(name) for name in files],
        )
    except _REFUSED as error:
        # huggingface_hub never writes the token into a message.
        status = getattr(getattr(error, "response", None), "status_code", 0)
        why = _ANSWERS.get(status, f"{type(error).__name__}: {first_line(error)}")
        raise CheckpointError(
            f"could not push to {repo_id!r}: {why}; the checkpoint is in {str(folder)!r}: try again with linearize push"
        ) from None
    return str(url)


def is_converted(folder: str | os.PathLike[str]) -> bool:
    """Tell whether a folder holds a converted model, by its config.json."""
    return read_mapping(Path(folder) / "config.json").get("model_type") == "linearize"


SNIPPET = re.compile(r'((?:\.from_pretrained|= SentenceTransformer|= load_converted)\()"(?:[^"\\\n]|\\.)*"(\))')
INDEX = re.compile(r"(^model-index:\n- name: ).*$", re.MULTILINE)


def with_name(card: str, name: str) -> str:
    """Return a card with another name in its loading lines and model index, such as that of the repository."""
    quoted = json.dumps(printable(name), ensure_ascii=False)
    front, between, rest = card.partition("\n---\n")
    front = INDEX.sub(lambda match: match[1] + quoted, front)
    return front + between + SNIPPET.sub(lambda match: f"{match[1]}{quoted}{match[2]}", rest, count=1)


def _name_card(path: Path, repo_id: str) -> None:
    """Put the name of the repository into the loading lines of a folder's card."""
    card = path / "README.md"
    if not card.is_file():
        return
    try:
        before = read_text(card)
        after = with_name(before, repo_id)
        if after != before:
            replace_listed(path, card.name, after)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(card)!r} cannot be given the repository's name ({first_line(error)}); repair or remove it"
        ) from None
