"""Read GGUF files as checkpoints: find the file, check it, and let transformers load it in fp32."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from linearize.core.errors import CheckpointError, UnsupportedModelError, first_line, missing_package

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SUFFIX = ".gguf"
OTHER_WEIGHTS = (".safetensors", ".bin")


class Header(NamedTuple):
    """Header of a GGUF file.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        parameters: number of parameters.
    """

    architecture: str
    parameters: int


def find_gguf(name: str | os.PathLike[str]) -> Path | None:
    """Return the GGUF file that a name refers to: the file itself, or the one in a folder without other weights.

    Args:
        name: Hub name, file or folder.

    Returns:
        The file; None if the name does not refer to a GGUF file.

    Raises:
        CheckpointError: if the file does not exist, or a folder holds several GGUF files.
    """
    path = Path(name).expanduser()
    if path.is_file():
        magic = b""
        with contextlib.suppress(OSError), path.open("rb") as begin:
            magic = begin.read(4)
        return path if path.suffix.lower() == SUFFIX or magic == b"GGUF" else None
    if not path.is_dir():
        if path.suffix.lower() == SUFFIX:
            raise CheckpointError(f"{str(name)!r}: no such GGUF file; check the path")
        return None
    files = sorted(file for file in path.iterdir() if file.is_file())
    if any(file.suffix.lower() in OTHER_WEIGHTS for file in files):
        return None
    models = [file for file in files if file.suffix.lower() == SUFFIX]
    if len(models) > 1:
        names = ", ".join(file.name for file in models)
        raise CheckpointError(f"{str(name)!r} holds {len(models)} GGUF files ({names}); give the path of one of them")
    return models[0] if models else None


def located(name: str) -> tuple[str, dict[str, str]]:
    """Return the name and options with which `from_pretrained` finds a checkpoint.

    transformers prefers tokenizer files in the same folder to the tokenizer inside a GGUF file.

    Raises:
        CheckpointError: if a GGUF file is damaged, or is only a part of a model.
        MissingPackageError: if the package `gguf` is needed and not installed.
    """
    file = _whole(name)
    return (name, {}) if file is None else (str(file.parent), {"gguf_file": file.name})


def read_config_values(name: str, revision: str | None = None) -> dict[str, Any]:
    """Return the values of a checkpoint's config, with the original's class for a GGUF file.

    Raises:
        CheckpointError: if a GGUF file is damaged, or is only a part of a model.
        UnsupportedModelError: if transformers cannot read a GGUF file of that architecture.
    """
    from transformers import PreTrainedConfig

    file = _whole(name)
    if file is None:
        return PreTrainedConfig.get_config_dict(name, revision=revision)[0]
    return dict(_gguf_values(*_stamp(file)))


def count_parameters(name: str | os.PathLike[str]) -> int | None:
    """Return the number of parameters in a GGUF file; None if the name does not refer to one.

    Raises:
        CheckpointError: if the file is damaged, or is only a part of a model.
    """
    file = _whole(name)
    return None if file is None else _header(*_stamp(file)).parameters


def load_weights(loader: Any, name: str, **options: Any) -> PreTrainedModel:
    """Load a model with a class of transformers; a GGUF file's weights are all in fp32.

    Args:
        loader: a model class or Auto class.
        name: Hub name, folder or GGUF file.
        **options: options of `from_pretrained`.

    Raises:
        CheckpointError: if a GGUF file is damaged, or lacks weights of the model.
        UnsupportedModelError: if transformers cannot read a GGUF file of that architecture.
    """
    place, where = located(name)
    if not where:
        return loader.from_pretrained(name, **options)
    _need("accelerate")
    import torch
    from transformers import GgufConfig

    classes = read_config_values(name)["architectures"]
    with _named(Path(place) / where["gguf_file"]), contextlib.redirect_stderr(io.StringIO()):  # no progress bar
        model, info = loader.from_pretrained(
            place,
            **where,
            **options,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    body = f"{model.base_model_prefix}."
    missing = sorted(key for key in info["missing_keys"] if type(model).__name__ in classes or key.startswith(body))
    if missing:
        raise CheckpointError(
            f"{name!r} lacks {len(missing)} tensors of {type(model).__name__} ({missing[0]} ...); download it again"
        )
    # transformers sets this to the title of the model, which could be mistaken for a name on the Hub.
    model.config._name_or_path = model.name_or_path = name
    vars(model.config).pop("_model_name_or_path", None)
    return model


def _stamp(path: Path) -> tuple[Path, int, int]:
    """Return facts that distinguish a file from a later one of the same name."""
    status = path.stat()
    return path, status.st_size, status.st_mtime_ns


def _whole(name: str | os.PathLike[str]) -> Path | None:
    """Return the GGUF file that a name refers to, after checking that it holds a whole model.

    Raises:
        CheckpointError: if it does not.
    """
    file = find_gguf(name)
    if file is not None:
        _header(*_stamp(file))
    return file


@functools.lru_cache(maxsize=8)
def _header(path: Path, size: int, changed: int) -> Header:
    """Return a file's header, after checking that all tensors of the model are in it."""
    gguf = _need("gguf")
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # Its type depends on where the file ends.
        raise CheckpointError(
            f"{str(path)!r} is not a complete GGUF file: it is cut off or damaged ({first_line(error)}); download it "
            "again"
        ) from error
    architecture, shards = (reader.get_field(key) for key in ("general.architecture", "split.count"))
    if shards is not None and (count := int(shards.contents())) > 1:
        raise CheckpointError(
            f"{str(path)!r} is one of {count} files of a model, expected one file; join them with llama.cpp's "
            "llama-gguf-split --merge"
        )
    parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    return Header("" if architecture is None else str(architecture.contents()), parameters)


def _need(package: str) -> Any:
    """Import a package of the extra `gguf`.

    Raises:
        MissingPackageError: if it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from error


@functools.lru_cache(maxsize=8)
def _gguf_values(path: Path, size: int, changed: int) -> dict[str, Any]:
    from transformers import PreTrainedConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    with _named(path):
        values = PreTrainedConfig.get_config_dict(path.parent, gguf_file=path.name)[0]
    # A GGUF file does not name a class; it is a language model.
    classes = {**MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    found = classes.get(str(values.get("model_type")))
    return {"architectures": [] if found is None else [found], **values}


@contextlib.contextmanager
def _named(path: Path) -> Any:
    """Raise a one-line error if transformers cannot read an intact file."""
    import transformers

    try:
        yield
    except Exception as error:  # Each architecture fails in its own way.
        architecture = _header(*_stamp(path)).architecture
        raise UnsupportedModelError(
            f"{path.name!r} holds the architecture {architecture!r}, which transformers {transformers.__version__} "
            f"cannot read from GGUF ({first_line(error)}); give a checkpoint in safetensors, or update transformers"
        ) from error
