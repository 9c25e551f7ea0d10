"""Load a model by Hub name, folder or GGUF file, with its tokenizer or image processor.

A sentence-transformers folder has more modules (pooling, normalisation, dense layers), which a checkpoint keeps:
`SentenceTransformer(FOLDER)` reads them from `modules.json`, without which it would use mean pooling and not normalise.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from linearize.checkpoint.ownership import check_links
from linearize.checkpoint.provenance import Record
from linearize.conversion.gguf import find_gguf, in_safetensors, load_weights, located, read_config_values, timm_options
from linearize.core.errors import (
    CheckpointError,
    ConfigError,
    LinearizeError,
    UnsupportedModelError,
    first_line,
    unknown_name,
)
from linearize.core.heads import HEADS, Modality, Processor, fit_tokenizer, head_of_class
from linearize.core.parsing import parse_json, read_json, user_path
from linearize.core.registry import Values

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

ModelT = TypeVar("ModelT", bound="nn.Module")

STREAM = "stream-blocks"
"""The option that loads a model with `stream`, for messages."""
MODALITIES: dict[str, Modality] = {"input_ids": "text", "pixel_values": "image"}


@dataclass
class Loaded:
    """A loaded model.

    Attributes:
        model: the model, in evaluation mode.
        processor: tokenizer or image processor; None if the checkpoint has none.
        modality: "text", "image" or "other".
        name: Hub name, folder or file.
        embedder: files of a sentence embedder's other modules, by name (see `sentence_files`).
        whole: processors of a model that reads sound, or several kinds of input; a checkpoint keeps them.
    """

    model: PreTrainedModel
    processor: Processor | None
    modality: Modality | Literal["other"]
    name: str
    embedder: dict[str, bytes] = field(default_factory=dict)
    whole: list[Processor] = field(default_factory=list)


def load_model(
    name: str,
    *,
    task: str | None = None,
    device: str = "cpu",
    revision: str | None = None,
    stream: bool = False,
    in_files: bool = False,
) -> Loaded:
    """Load a model with the head that its config names, or the head of a task.

    Args:
        name: Hub name, folder or GGUF file.
        task: a key of `linearize.core.heads.HEADS`; None for the class in the config's `architectures`.
        device: device of the model.
        revision: branch, tag or commit on the Hub.
        stream: whether the blocks stay in their files (`linearize.modeling.offload`), which must be safetensors.
        in_files: whether blocks, embedding and head stay in their files, where that is possible.

    Raises:
        CheckpointError: if the folder is not a checkpoint, the Hub name cannot be reached, or a weight is not finite.
        UnsupportedModelError: if the model needs its own code, or is already converted; or if its blocks cannot stay
            in their files.
        UnknownNameError: for an unknown task.
    """
    from linearize.modeling import offload
    from linearize.modeling.weights import check_numbers

    raw, loader, architecture = model_loader(name, task, revision)
    load = functools.partial(load_weights, loader, name, revision=revision, **timm_options(raw))
    with explained(name, f"as {architecture}" if architecture else ""):
        if not (stream or in_files) or not in_safetensors(name, raw, revision):
            if stream:
                raise UnsupportedModelError(
                    f"{STREAM}: {name!r} is a GGUF file, a model of timm or not in safetensors files, expected a "
                    "transformers checkpoint in safetensors files; leave it out"
                )
            model = load()
        else:
            keep = functools.partial(offload.load_streamed, what=STREAM) if stream else offload.load_in_files
            model = keep(empty_model(name, task=task, revision=revision), load, check_device(device))
    check_numbers(model, repr(name))
    return _loaded(model, name, device, revision)


def model_loader(name: str, task: str | None, revision: str | None) -> tuple[Values, Any, str]:
    """Return the values in a checkpoint's config, the class that loads it, and the class that its config names.

    Raises:
        CheckpointError: if the folder is not a checkpoint, or the Hub name cannot be reached.
        UnsupportedModelError: if the model is already converted.
        UnknownNameError: for an unknown task.
    """
    import transformers

    if task is not None and task not in HEADS:
        raise unknown_name("task", task, HEADS)
    raw = read_config(name, revision)
    if raw.get("model_type") == "linearize":
        raise UnsupportedModelError(f"{name!r} is already converted; start from the original checkpoint")
    architecture = (raw.get("architectures") or [None])[0]
    loader: Any = getattr(transformers, HEADS[task].auto_class if task else str(architecture), None)
    if task is None and not (isinstance(loader, type) and issubclass(loader, transformers.PreTrainedModel)):
        # timm's config.json does not name a transformers class.
        classifier = "architecture" in raw and raw.get("num_classes")
        loader = transformers.AutoModelForImageClassification if classifier else transformers.AutoModel
    return raw, loader, architecture or ""


def empty_model(name: str, *, task: str | None = None, revision: str | None = None) -> PreTrainedModel:
    """Return a model without weights, in its checkpoint's dtype, from its config alone.

    Raises:
        CheckpointError: if no model can be built from the config; or as in `model_loader`.
        UnsupportedModelError: as in `model_loader`.
    """
    import transformers

    from linearize.modeling.offload import without_weights

    _, loader, architecture = model_loader(name, task, revision)
    with explained(name, f"as {architecture}" if architecture else ""):
        config = transformers.AutoConfig.from_pretrained(name, revision=revision)
        return without_weights(loader.from_config if hasattr(loader, "from_config") else loader._from_config, config)


def _loaded(model: PreTrainedModel, name: str, device: str, revision: str | None = None) -> Loaded:
    from linearize.modeling.weights import check_merged

    modality: Modality | Literal["other"] = MODALITIES.get(model.main_input_name, "other")
    check_merged(model)
    move(model.eval(), check_device(device))
    # A model with a head is not a sentence embedder.
    embedder = sentence_files(name, revision) if model.base_model is model else {}
    processor, whole = None, []
    with contextlib.suppress(LinearizeError):
        processor = None if modality == "other" else load_processor(name, modality, revision)
    several = modality == "other" or getattr(model.config, "sub_configs", None)
    for kind in ("sound", "all") if several else ():
        with contextlib.suppress(LinearizeError):
            whole.append(load_processor(name, kind, revision))
    if model.base_model is not model and not model.can_generate():
        fit_tokenizer(model, processor)
    return Loaded(model, processor, modality, name, embedder, whole)


def load_converted(name: str, *, device: str = "cpu", in_files: bool = False) -> Loaded:
    """Load a converted checkpoint with the head that it was saved with.

    Args:
        name: folder or Hub name.
        device: device of the model.
        in_files: as in `load_model`.

    Raises:
        CheckpointError: if it is not a converted checkpoint, or is damaged.
    """
    from transformers import AutoConfig, AutoModel

    from linearize.modeling import offload
    from linearize.modeling.model import saved_class
    from linearize.modeling.weights import check_numbers

    raw = check_converted(name)
    saved = saved_class(config := AutoConfig.from_pretrained(name))
    load = functools.partial((saved or AutoModel).from_pretrained, name)
    with quiet():
        if in_files and saved is not None and in_safetensors(name, raw):
            model = offload.load_in_files(
                offload.without_weights(saved._from_config, config), load, check_device(device)
            )
            check_numbers(model)
        else:
            model = load()
    return _loaded(model, name, device)


def auto_class(model: PreTrainedModel) -> str:
    """Return the name of the Auto class that loads a model, converted or not, with its head; empty if none does."""
    import transformers
    from transformers.models.auto import modeling_auto

    name = type(model).__name__
    kind = (getattr(model.config, "linearize", None) or {}).get("base_model_type", model.config.model_type)
    head = head_of_class(name)
    autos = ((key, auto) for key, auto in vars(modeling_auto).items() if isinstance(auto, type))
    tables = {key: table for key, auto in autos if (table := getattr(auto, "_model_mapping", None)) is not None}
    classes = {key: table._model_mapping.get(kind) for key, table in tables.items()}
    found = [key for key, its in classes.items() if name == its or (isinstance(its, (list, tuple)) and name in its)]
    if not found and hasattr(transformers, name):
        return ""
    if head is not None and (head.auto_class in found or not found):
        return head.auto_class
    # Many classes are in this table as well as in that of their head.
    return min(found, key=lambda key: (key != "AutoModel", key == "AutoModelForPreTraining"), default="AutoModel")


def load_code(model: PreTrainedModel, shown: str) -> tuple[str, str]:
    """Return the import and the call, in Python, that load a saved model with its head; `shown` is its name there."""
    name = auto_class(model)
    if not name:
        return "from linearize.checkpoint.loading import load_converted", f"load_converted({shown}).model"
    return f"from transformers import {name}", f"{name}.from_pretrained({shown})"


def check_converted(name: str) -> Values:
    """Return the config of a converted checkpoint.

    Raises:
        CheckpointError: if it is not a converted checkpoint, or cannot be read.
    """
    raw = read_config(name)
    if raw.get("model_type") != "linearize":
        raise CheckpointError(f"{name!r} is not a converted checkpoint; convert it first: linearize convert {name}")
    return raw


def model_type(name: str) -> str | None:
    """Return the `model_type` in a checkpoint's config: "linearize" for converted models.

    Raises:
        CheckpointError: if the folder is not a checkpoint, or the Hub name cannot be reached.
    """
    return read_config(name).get("model_type")


def move(model: ModelT, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> ModelT:
    """Move a model to a device or dtype, in place; an offloaded one stays where it is."""
    from linearize.modeling.weights import is_offloaded

    return model if is_offloaded(model) else model.to(device=device, dtype=dtype)


def check_device(name: str) -> str:
    """Return the name of an available device; "auto" picks the fastest.

    Raises:
        ConfigError: if the device is not available.
    """
    import torch

    available = ["cpu"]
    if torch.cuda.is_available():
        available += ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        available.append("mps")
    if name == "auto":
        return next((d for d in ("cuda", "mps") if d in available), "cpu")
    if name not in available:
        raise ConfigError(f"device: got {name!r}, but this machine has {', '.join(available)}; choose one of them")
    return name


def read_config(name: str, revision: str | None = None) -> Values:
    """Return the values in a checkpoint's config.json, or in a GGUF file.

    Raises:
        CheckpointError: if the folder is not a checkpoint, or the Hub name cannot be reached.
    """
    file = user_path(name) / "config.json"
    exists = os.path.exists(file.parent)
    is_folder = find_gguf(name) is None and (exists or name.startswith((".", "/", "~")))
    if is_folder and not exists:
        raise CheckpointError(f"{name!r} does not exist; expected the folder of a checkpoint, or a Hub name")
    if is_folder and not file.is_file():
        what = (
            "is not a checkpoint: expected a folder with a config.json, or a GGUF file; give one of them or a Hub name"
        )
        if (file.parent / "adapter_config.json").is_file():
            what = "holds only an adapter of peft; merge it into its model first (merge_and_unload, save_pretrained)"
        raise CheckpointError(f"{name!r} {what}")
    with explained(name, "its config.json"):
        values = read_json(file) if is_folder else read_config_values(name, revision)
        if not isinstance(values, dict):
            raise TypeError(f"got a {type(values).__name__}, expected an object")
        classes = values.get("architectures") or []
        if not isinstance(classes, str | list) or not all(isinstance(one, str) for one in classes):
            raise TypeError(f"got architectures {repr(classes)[:80]}, expected a list of class names")
        return {**values, "architectures": [classes]} if isinstance(classes, str) else values


@contextlib.contextmanager
def explained(name: str, what: str = "") -> Iterator[None]:
    """Turn transformers' errors into one line with advice, without its progress bars.

    Args:
        name: the checkpoint's name; a folder with links that lead out of it is refused.
        what: description of what is being loaded, for the message.

    Raises:
        CheckpointError: if the checkpoint is damaged, missing or unreachable, or has a link that leads out of it.
        UnsupportedModelError: if it needs its own code.
    """
    from safetensors import SafetensorError

    check_links(name)
    try:
        with quiet():
            yield
    except LinearizeError:
        raise
    except (SafetensorError, EOFError, UnpicklingError) as error:
        # torch advises to run what a pickle holds.
        why = first_line(error) if isinstance(error, SafetensorError) else "not a pickle of tensors"
        raise CheckpointError(
            f"{name!r} cannot be loaded, its weights are damaged ({why}); download it again"
        ) from error
    except Exception as error:  # A damaged file may raise anything.
        first = first_line(error)
        first = f"{type(error).__name__}: {first}" if isinstance(error, ArithmeticError | LookupError) else first
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"{name!r} runs its own code, which linearize does not convert; use an architecture of transformers"
            ) from error
        if os.path.exists(user_path(name)) or not isinstance(error, OSError):
            raise CheckpointError(f"{name!r} cannot be loaded{f', {what}' if what else ''}: {first}") from error
        offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
        repair = "unset HF_HUB_OFFLINE" if offline else "check the spelling and the network"
        raise CheckpointError(
            f"{name!r} is neither a folder nor a Hub name that can be reached; {repair}, or give the folder of a "
            "downloaded checkpoint"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Temporarily hide transformers' progress bars and its list of unused head weights."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def load_processor(name: str, modality: str, revision: str | None = None) -> Any:
    """Load the tokenizer or image processor of a checkpoint; "sound": its feature extractor; "all": several in one.

    Raises:
        CheckpointError: if it has none.
    """
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor, AutoTokenizer

    autos: Any = {"text": AutoTokenizer, "image": AutoImageProcessor, "sound": AutoFeatureExtractor}
    kind = {"text": "tokenizer", "image": "image processor"}.get(modality, "processor")
    with explained(name, f"its {kind}"):
        place, where = located(name)
        processor = autos.get(modality, AutoProcessor).from_pretrained(place, revision=revision, **where)
        tokenizer: Any = getattr(processor, "tokenizer", processor)
        if hasattr(tokenizer, "get_vocab"):
            special = {*tokenizer.all_special_tokens, *getattr(tokenizer, "get_added_vocab", dict)(), ".", "\u2581"}
            # transformers makes a tokenizer of these alone if the checkpoint has none.
            if special.issuperset(tokenizer.get_vocab()):
                raise CheckpointError(
                    f"{name!r} has no tokenizer, or one without words; save the model's own there (save_pretrained)"
                )
        return processor


MODULES, TRANSFORMER = "modules.json", "sentence_bert_config.json"
OWN = ("config_sentence_transformers.json", TRANSFORMER)
NAME = re.compile(r"\w[\w.+ -]{0,99}")
"""A folder's name in the path of a module; with `.`, the module's config.json would replace the model's own."""
_POOLINGS = {"mean": "mean", "mean_sqrt_len": "mean", "cls": "first", "lasttoken": "last"}
"""Poolings by their names in sentence-transformers; a factor does not change a cosine."""
_MODE, _KNOWN = "pooling_mode_", (".Transformer", ".Pooling", ".Normalize")
PARTS = ("config.json", "model.safetensors")
"""Files that a module may have; weights as pickles are refused."""


def sentence_files(name: str, revision: str | None = None) -> dict[str, bytes]:
    """Return the files that make a checkpoint a sentence embedder; empty if it is not an embedder.

    Args:
        name: folder, whose links were checked (`linearize.checkpoint.ownership.check_links`), or Hub name.
        revision: branch, tag or commit on the Hub.

    Returns:
        Contents by name within the folder, such as `1_Pooling/config.json`.

    Raises:
        CheckpointError: if the list of modules cannot be read or leads out of the folder, or a module's weights are a
            pickle.
    """
    content = _bytes(name, MODULES, revision)
    if content is None:
        return {}
    modules = _parse(name, MODULES, content)
    if not isinstance(modules, list) or not all(isinstance(module, dict) and "path" in module for module in modules):
        raise CheckpointError(f"{name!r}: {MODULES} is not a list of modules with paths; download the checkpoint again")
    files = {MODULES: content}
    for file in OWN:
        if (text := _bytes(name, file, revision)) is not None:
            if not isinstance(values := _parse(name, file, text), dict):
                kind = type(values).__name__
                raise CheckpointError(f"{name!r}: {file} holds a {kind}, expected an object; download it again")
            files[file] = text
    for path in filter(None, (str(module["path"]) for module in modules)):
        if len(path) > 200 or not all(NAME.fullmatch(part) for part in path.split("/")):
            shown = path if len(path) <= 40 else f"{path[:40]}..."
            raise CheckpointError(
                f"{name!r}: {MODULES} names {shown!r}, expected a folder inside the checkpoint such as '1_Pooling'; "
                "repair it"
            )
        parts = {f"{path}/{file}": _bytes(name, f"{path}/{file}", revision) for file in PARTS}
        if parts[f"{path}/{PARTS[1]}"] is None and _bytes(name, f"{path}/pytorch_model.bin", revision) is not None:
            raise CheckpointError(
                f"{name!r}: module {path!r} has its weights as a pickle; save it again with sentence-transformers, "
                "which writes safetensors"
            )
        files |= {file: text for file, text in parts.items() if text is not None}
    return files


def with_length(files: Mapping[str, bytes], tokens: int | None) -> dict[str, bytes]:
    """Return the files with another maximum input length in tokens; unchanged if that is None."""
    if tokens is None or not files:
        return dict(files)
    values = parse_json(files.get(TRANSFORMER, b"{}"))
    return {**files, TRANSFORMER: json.dumps({**values, "max_seq_length": tokens}, indent=2).encode()}


def pooling(files: Mapping[str, bytes]) -> tuple[str, list[str]]:
    """Return how an embedder pools states, "mean", "first" or "last", and what else it does, which is not done here.

    The latter are modules such as dense layers, prompts, and other poolings, in whose place the mean is taken.
    """
    modes: list[str] = []
    more: list[str] = []
    for name, content in files.items():
        with contextlib.suppress(ValueError):
            values: Any = parse_json(content) if name.endswith(".json") else None
            if name == MODULES:
                others = (m for m in values if m["path"] and not str(m.get("type", ".Pooling")).endswith(_KNOWN))
                more += [f"module {str(module['path'])!r}" for module in others]
            elif name == OWN[0]:
                more += [f"prompt {key!r}" for key, text in Record(values).part("prompts").values.items() if text]
            elif name.endswith("/config.json"):
                values = Record(values).values
                on = [key.removeprefix(_MODE) for key in values if key.startswith(_MODE) and values[key] is True]
                mode = values.get("pooling_mode", on)
                modes += mode if isinstance(mode, list) else [mode]
    mode = ", ".join(re.sub("_tokens?$", "", str(mode)) for mode in modes) or "mean"
    return _POOLINGS.get(mode, "mean"), more if mode in _POOLINGS else [*more, f"pooling {mode!r}"]


def _parse(name: str, file: str, content: bytes) -> object:
    try:
        return parse_json(content)
    except ValueError as error:
        raise CheckpointError(
            f"{name!r}: {file} cannot be read as JSON ({error}); download the checkpoint again"
        ) from None


def _bytes(name: str, file: str, revision: str | None) -> bytes | None:
    """Return the bytes of a checkpoint's file; None if it does not exist."""
    folder = user_path(name)
    if folder.is_dir():
        path = folder / file
        return path.read_bytes() if path.is_file() else None
    # Imported here: pushing a folder needs no torch.
    from linearize.modeling.weights import find_file

    cached = None
    with contextlib.suppress(OSError, ValueError):
        cached = find_file(name, file, {"revision": revision})
    return None if cached is None else Path(cached).read_bytes()
