"""Read GGUF files as checkpoints: find the file, check it, and let transformers load it in fp32."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from linearize.core.errors import CheckpointError, UnsupportedModelError, first_line, missing_package
from linearize.core.parsing import user_path
from linearize.core.registry import ReadOnlyValues, Values

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel

SUFFIX = ".gguf"
SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
"""Ending of the names that llama.cpp gives the files of a split model."""
OTHER_WEIGHTS = (".safetensors", ".bin")


def find_gguf(name: str | os.PathLike[str]) -> Path | None:
    """Return the GGUF file that a name refers to: the file itself, or the one in a folder without other weights.

    Args:
        name: Hub name, file or folder.

    Returns:
        The file (the first existing one of a model in shards); None if the name does not refer to a GGUF file.

    Raises:
        CheckpointError: if the file does not exist, or a folder holds several GGUF models.
    """
    path = user_path(name)
    # Unlike the methods of a path, these functions take a name that is too long for a file.
    if os.path.isfile(path):
        magic = b""
        with contextlib.suppress(OSError), path.open("rb") as begin:
            magic = begin.read(4)
        return path if path.suffix.lower() == SUFFIX or magic == b"GGUF" else None
    if not os.path.isdir(path):
        if path.suffix.lower() == SUFFIX:
            raise CheckpointError(f"{str(name)!r}: no such GGUF file; check the path")
        return None
    files = sorted(filter(Path.is_file, path.iterdir()))
    if not {file.suffix.lower() for file in files}.isdisjoint(OTHER_WEIGHTS):
        return None
    models = {SHARD.sub("", file.name): file for file in reversed(files) if file.suffix.lower() == SUFFIX}
    if len(models) > 1:
        names = ", ".join(sorted(file.name for file in models.values()))
        raise CheckpointError(f"{str(name)!r} holds {len(models)} GGUF models ({names}); give the path of one of them")
    return next(iter(models.values()), None)


def located(name: str) -> tuple[str, dict[str, str]]:
    """Return the name and options with which `from_pretrained` finds a checkpoint.

    transformers prefers tokenizer files in the same folder to the tokenizer inside a GGUF file.

    Raises:
        CheckpointError: if a GGUF file is damaged, or one of its shards is missing.
        MissingPackageError: if the package `gguf` is needed and not installed.
    """
    file = _whole(name)
    return (name, {}) if file is None else (str(file.parent), {"gguf_file": file.name})


def read_config_values(name: str, revision: str | None = None) -> Values:
    """Return the values of a checkpoint's config, with the original's class for a GGUF file.

    Raises:
        CheckpointError: if a GGUF file is damaged, or one of its shards is missing.
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
        CheckpointError: if the file is damaged, or one of its shards is missing.
    """
    file = _whole(name)
    return None if file is None else _header(*_stamp(file))[2]


def load_weights(loader: Any, name: str, **options: Any) -> PreTrainedModel:
    """Load a model with a class of transformers; a GGUF file's weights are all in fp32.

    Args:
        loader: a model class or Auto class.
        name: Hub name, folder or GGUF file.
        **options: options of `from_pretrained`.

    Raises:
        CheckpointError: if a GGUF file is damaged or lacks weights of the model; or if another file lacks weights of a
            layer, or has weights of another size than the model.
        UnsupportedModelError: if transformers cannot read a GGUF file of that architecture.
    """
    place, where = located(name)
    if not where:
        # Otherwise transformers' error would refer to a report that is hidden.
        new_head, options["ignore_mismatched_sizes"] = options.get("ignore_mismatched_sizes", False), True
        model, info = loader.from_pretrained(name, output_loading_info=True, **options)
        _check_layers(model, name, info, new_head)
        return model
    _need("accelerate")
    import torch
    from transformers import GgufConfig

    from linearize.modeling.weights import body_prefix

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
    body = body_prefix(model)
    missing = sorted(key for key in info["missing_keys"] if type(model).__name__ in classes or key.startswith(body))
    if missing:
        raise _lacking(model, name, info, missing)
    # transformers sets this to the title of the model, which could be mistaken for a name on the Hub.
    model.config._name_or_path = model.name_or_path = name
    vars(model.config).pop("_model_name_or_path", None)
    return model


def timm_options(config: ReadOnlyValues) -> Values:
    """Return options of `load_weights` for a folder that timm wrote: its arguments without transformers' own."""
    arguments = config.get("model_args")
    if "architecture" not in config or not isinstance(arguments, dict) or "num_classes" not in arguments:
        return {}
    return {"model_args": {key: value for key, value in arguments.items() if key != "num_classes"}}


def in_safetensors(name: str, config: ReadOnlyValues, revision: str | None = None) -> bool:
    """Tell whether a checkpoint's weights are in safetensors files with the usual names, and not in timm's.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """
    # Imported here, as finding a GGUF file needs no torch.
    from linearize.modeling.weights import read_header

    return find_gguf(name) is None and "architecture" not in config and bool(read_header(name, revision=revision))


def _lacking(model: PreTrainedModel, name: str, info: ReadOnlyValues, missing: list[str]) -> CheckpointError:
    """Return the error for tensors that a checkpoint lacks, or has under names that the model's class does not read."""
    own = type(model).__name__
    same = [key for key in info["unexpected_keys"] if key.partition(".")[2] == missing[0].partition(".")[2]]
    todo = f"they are there, as {same[0]} ..., but {own} reads other names: choose another task" if same else ""
    what = f"{name!r} lacks {len(missing)} tensors of {own} ({missing[0]} ...)"
    return CheckpointError(f"{what}; {todo or 'download it again'}")


def _check_layers(model: PreTrainedModel, name: str, info: ReadOnlyValues, new_head: bool) -> None:
    """Check that a model's layers were loaded; transformers fills in missing weights at random.

    Heads and poolers may be new, and with `new_head` a head may replace one of another size.
    """
    from linearize.modeling.weights import body_prefix

    layers = re.compile(rf"{re.escape(body_prefix(model))}(.*\.)?\d+\.")
    if missing := sorted(filter(layers.match, info["missing_keys"])):
        raise _lacking(model, name, info, missing)
    for key, stored, wanted in sorted(info["mismatched_keys"]):
        if layers.match(key) or not new_head:
            raise CheckpointError(
                f"{name!r} holds {key} of size {list(stored)}, but its config asks for {list(wanted)}; repair the "
                "config, or download it again"
            )


def _stamp(path: Path) -> tuple[Path, int, int]:
    """Return facts that distinguish a file from a later one of the same name."""
    status = path.stat()
    return path, status.st_size, status.st_mtime_ns


def _whole(name: str | os.PathLike[str]) -> Path | None:
    """Return a GGUF file with all tensors: the file itself, or a temporary one if the model is in shards.

    Raises:
        CheckpointError: if a file is damaged or missing.
    """
    file = find_gguf(name)
    if file is None:
        return None
    _, count, _ = _header(*_stamp(file))
    part = SHARD.search(file.name)
    if count == 1 and part is None:
        return file
    problem = f"{str(file)!r} is one of {count} files of a model"
    if part is None or int(part[2]) != max(count, 1):
        expected = f"expected a name like model-00001-of-{count:05}.gguf"
        raise CheckpointError(f"{problem}; {expected}: restore the original names of all files")
    names = [f"{file.name[: part.start()]}-{number:05}-of-{part[2]}{SUFFIX}" for number in range(1, count + 1)]
    if missing := [name for name in names if not (file.parent / name).is_file()]:
        raise CheckpointError(f"{problem}; missing: {', '.join(missing)}; download them into the same folder")
    return _joined(tuple(_stamp(file.parent / name) for name in names))[1]


@functools.lru_cache(maxsize=8)
def _header(path: Path, size: int, changed: int) -> tuple[str, int, int]:
    """Return a file's architecture, number of shards and parameters, after checking that all its tensors are in it.

    The architecture is llama.cpp's name; it is empty in all shards but the first.
    """
    reader = _open(path)
    architecture, shards = (reader.get_field(key) for key in ("general.architecture", "split.count"))
    return (
        "" if architecture is None else str(architecture.contents()),
        1 if shards is None else int(shards.contents()),
        sum(int(tensor.n_elements) for tensor in reader.tensors),
    )


def _need(package: str) -> ModuleType:
    """Import a package of the extra `gguf`.

    Raises:
        MissingPackageError: if it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from error


def _open(path: Path) -> GGUFReader:
    gguf = _need("gguf")
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # Its type depends on where the file ends.
        raise CheckpointError(
            f"{str(path)!r} is not a complete GGUF file: it is cut off or damaged ({first_line(error)}); download it "
            "again"
        ) from error


@functools.lru_cache(maxsize=2)
def _joined(files: tuple[tuple[Path, int, int], ...]) -> tuple[object, Path]:
    """Join the shards of a model, as transformers reads one file, in a temporary folder that is removed at exit.

    Returns:
        The folder, which lives as long as this value, and the file in it.
    """
    from gguf import GGUFValueType, GGUFWriter

    readers = [_open(path) for path, *_ in files]
    architecture, _, _ = _header(*files[0])
    try:
        folder = tempfile.TemporaryDirectory(prefix="linearize-gguf-")
        path = Path(folder.name) / files[0][0].name
        writer = GGUFWriter(path, architecture)
        for field in readers[0].fields.values():
            # The writer adds these.
            if field.name == "general.architecture" or field.name.startswith(("GGUF.", "split.")):
                continue
            kind, inner = field.types[0], field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
        for tensor in (tensor for reader in readers for tensor in reader.tensors):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    except OSError as error:
        raise CheckpointError(
            f"the {len(files)} shards of {files[0][0].name!r} cannot be joined in {tempfile.gettempdir()!r} "
            f"({first_line(error)}); make room there, or set TMPDIR to another folder"
        ) from error
    return folder, path


@functools.lru_cache(maxsize=8)
def _gguf_values(path: Path, size: int, changed: int) -> Values:
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
def _named(path: Path) -> Iterator[None]:
    """Raise a one-line error if transformers cannot read an intact file."""
    import transformers

    try:
        yield
    except Exception as error:  # Each architecture fails in its own way.
        architecture, _, _ = _header(*_stamp(path))
        raise UnsupportedModelError(
            f"{path.name!r} holds the architecture {architecture!r}, which transformers {transformers.__version__} "
            f"cannot read from GGUF ({first_line(error)}); give a checkpoint in safetensors, or update transformers"
        ) from error
