"""Load a model by Hub name, folder or GGUF file, with its tokenizer or image processor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from linearize.checkpoint.ownership import check_links
from linearize.conversion.gguf import find_gguf, load_weights, located, read_config_values
from linearize.core.errors import (
    CheckpointError,
    ConfigError,
    LinearizeError,
    UnsupportedModelError,
    first_line,
    unknown_name,
)
from linearize.core.heads import HEADS, Modality
from linearize.core.parsing import read_json

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from linearize.core.types import Processor

ModelT = TypeVar("ModelT", bound="nn.Module")

MODALITIES: dict[str, Modality] = {"input_ids": "text", "pixel_values": "image"}


@dataclass
class Loaded:
    """A loaded model.

    Attributes:
        model: the model, in evaluation mode.
        processor: tokenizer or image processor; None if the checkpoint has none.
        modality: "text", "image" or "other".
        name: Hub name, folder or file.
        embedder: files of a sentence embedder's other modules, by name (see `linearize.checkpoint.sentence`).
    """

    model: PreTrainedModel
    processor: Processor | None
    modality: Modality | Literal["other"]
    name: str
    embedder: dict[str, bytes] = field(default_factory=dict)


def load_model(name: str, *, task: str | None = None, device: str = "cpu", revision: str | None = None) -> Loaded:
    """Load a model with the head that its config names, or the head of a task.

    Args:
        name: Hub name, folder or GGUF file.
        task: a key of `linearize.core.heads.HEADS`; None: the class in the config's `architectures`.
        device: device of the model.
        revision: branch, tag or commit on the Hub.

    Raises:
        CheckpointError: if the folder is not a checkpoint, the Hub name cannot be reached, or a weight is not finite.
        UnsupportedModelError: if the model needs its own code, or is converted already.
        UnknownNameError: for an unknown task.
    """
    import transformers

    from linearize.modeling.weights import check_numbers

    if task is not None and task not in HEADS:
        raise unknown_name("task", task, HEADS)
    raw = _read_config(name, revision)
    if raw.get("model_type") == "linearize":
        raise UnsupportedModelError(f"{name!r} is converted already; start from the original checkpoint")
    architecture = (raw.get("architectures") or [None])[0]
    loader: Any = getattr(transformers, HEADS[task].auto_class if task else str(architecture), None)
    if task is None and not (isinstance(loader, type) and issubclass(loader, transformers.PreTrainedModel)):
        loader = transformers.AutoModel
    if task is None and "architecture" in raw and raw.get("num_classes"):
        # timm's config.json does not name a class of transformers.
        loader = transformers.AutoModelForImageClassification
    with quiet(), _explained(name, architecture):
        model = load_weights(loader, name, revision=revision, **_timm_options(name, revision, raw))
    check_numbers(model, repr(name))
    modality: Modality | Literal["other"] = MODALITIES.get(model.main_input_name, "other")
    model.eval().to(check_device(device))
    return Loaded(model, _load_processor(name, revision, modality), modality, name, _embedder(model, name, revision))


def _timm_options(name: str, revision: str | None, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a folder that timm wrote, without the arguments that transformers sets itself."""
    arguments = raw.get("model_args")
    if "architecture" not in raw or not isinstance(arguments, dict) or "num_classes" not in arguments:
        return {}
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name, revision=revision)
    config.model_args = {key: value for key, value in arguments.items() if key != "num_classes"}
    return {"config": config}


def load_converted(name: str, *, device: str = "cpu") -> Loaded:
    """Load a converted checkpoint with the head that it was saved with.

    Args:
        name: folder or Hub name.
        device: device of the model.

    Raises:
        CheckpointError: if it is not a converted checkpoint, or is damaged.
    """
    import transformers

    raw = check_converted(name)
    config = transformers.AutoConfig.from_pretrained(name)
    base: Any = getattr(transformers, str((raw.get("architectures") or [""])[0]).removeprefix("Linearized"), None)
    with quiet():
        if base is None:
            model = transformers.AutoModel.from_pretrained(name)
        else:
            from linearize.modeling.model import model_class

            model = model_class(base, type(config)).from_pretrained(name)
    modality: Modality | Literal["other"] = MODALITIES.get(model.main_input_name, "other")
    model.eval().to(check_device(device))
    return Loaded(model, _load_processor(name, None, modality), modality, name, _embedder(model, name, None))


def check_converted(name: str) -> dict[str, Any]:
    """Return the config of a converted checkpoint.

    Raises:
        CheckpointError: if it is not a converted checkpoint, or cannot be read.
    """
    raw = _read_config(name, None)
    if raw.get("model_type") != "linearize":
        raise CheckpointError(f"{name!r} is not a converted checkpoint; convert it first: linearize convert {name}")
    return raw


def _embedder(model: PreTrainedModel, name: str, revision: str | None) -> dict[str, bytes]:
    """Return the files of a sentence embedder's other modules; empty for a model with a head."""
    from linearize.checkpoint.sentence import sentence_files

    return sentence_files(name, revision) if model.base_model is model else {}


def model_type(name: str) -> str | None:
    """Return the `model_type` in a checkpoint's config: "linearize" for converted models.

    Raises:
        CheckpointError: if the folder is not a checkpoint, or the Hub name cannot be reached.
    """
    return _read_config(name, None).get("model_type")


def move(model: ModelT, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> ModelT:
    """Move a model to a device or dtype, in place; transformers' own `to` has annotations for neither."""
    return model.to(device=device, dtype=dtype)


def check_device(name: str) -> str:
    """Return the name of an available device; "auto" is the fastest one.

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


def _read_config(name: str, revision: str | None) -> dict[str, Any]:
    path = Path(name)
    if find_gguf(name) is None and (path.exists() or name.startswith((".", "/", "~"))):
        file = path.expanduser() / "config.json"
        if not path.expanduser().exists():
            raise CheckpointError(f"{name!r} does not exist; expected the folder of a checkpoint, or a Hub name")
        if not file.is_file():
            raise CheckpointError(
                f"{name!r} is no checkpoint: expected a folder with a config.json, or a GGUF file; give one of "
                "them or a Hub name"
            )
        check_links(name)
        try:
            raw = read_json(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be read as JSON ({error}); download the checkpoint again") from None
        if not isinstance(raw, dict):
            raise CheckpointError(f"{file}: got a {type(raw).__name__}, expected an object; download it again")
        return raw
    with _explained(name, None):
        return read_config_values(name, revision)


@contextlib.contextmanager
def _explained(name: str, architecture: str | None) -> Iterator[None]:
    """Turn transformers' errors into one line with advice."""
    from safetensors import SafetensorError

    try:
        yield
    except LinearizeError:
        raise
    except SafetensorError as error:
        raise CheckpointError(
            f"{name!r} cannot be loaded, its weights are damaged ({first_line(error)}); download it again"
        ) from error
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = first_line(error)
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"{name!r} runs its own code, which linearize does not convert; use an architecture of transformers"
            ) from error
        if Path(name).exists():
            raise CheckpointError(
                f"{name!r} cannot be loaded{f' as {architecture}' if architecture else ''}: {first}"
            ) from error
        offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
        repair = "unset HF_HUB_OFFLINE" if offline else "check the spelling and the network"
        raise CheckpointError(
            f"{name!r} is neither a folder nor a Hub name that can be reached; {repair}, or give the folder of a "
            "downloaded checkpoint"
        ) from error


def wait(device: torch.device | None = None) -> None:
    """Wait for the given GPU, or the current one, if one is in use."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize(device)
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()


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


def _load_processor(name: str, revision: str | None, modality: str) -> Processor | None:
    from transformers import AutoImageProcessor, AutoTokenizer

    auto: Any = {"text": AutoTokenizer, "image": AutoImageProcessor}.get(modality)
    if auto is None:
        return None
    place, where = located(name)
    try:
        with quiet():
            return auto.from_pretrained(place, revision=revision, **where)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError):
        return None
