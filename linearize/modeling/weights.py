"""Check from its header, before any weight is read, that a weights file belongs to its config.json.

A damaged or edited folder is rejected as a whole: no partial model is built, and no memory is allocated for sizes that
only config.json claims.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import re
from collections.abc import Mapping, Set
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, revert_weight_conversion
from transformers.utils import cached_file

from linearize.core.errors import CheckpointError, ConfigError, first_line, some
from linearize.core.registry import ReadOnlyValues, Values
from linearize.modeling.plan import ABSENT, damaged

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of stored floating point weights: the names in safetensors, and the names in config.json."""
OFFLOADED = "offloaded"
"""Attribute of a model whose blocks stay in their weights files (`linearize.modeling.offload`)."""
BLOCKS = "offloaded_blocks"
"""Attribute of such a model whose blocks run one after the other over all rows: its list of blocks."""
Stored = tuple[tuple[int, ...], str]
"""A stored tensor: its shape, and the safetensors name of its dtype."""


def check_weights(
    name: str | os.PathLike[str],
    model: type[PreTrainedModel],
    config: PreTrainedConfig,
    variant: str | None = None,
    **hub: object,
) -> tuple[set[str], dict[str, str] | None]:
    """Check that the weights of a checkpoint fit the model that its config.json describes.

    Args:
        name: folder, or name on the Hub.
        model: class of the saved model.
        config: the checkpoint's own config, without the caller's changes.
        variant: the part of the weights files' names that the caller gave to `from_pretrained`.
        **hub: those of `HUB_OPTIONS` that the caller gave to `from_pretrained`.

    Returns:
        The names of the saved weights in the model, empty if they are not in safetensors files with the usual names;
        and the renamings that loading must apply again (checkpoints from before 2026-12 have some applied twice), or
        None.

    Raises:
        CheckpointError: if a file is missing or truncated, or a tensor is missing, unexpected, or has the wrong size or
            type.
    """
    stored = read_header(name, variant, **hub)
    if stored is None:
        return set(), None
    # Before modules are built, check that config.json does not ask for more layers than the file has tensors.
    configs = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", None) or {})]
    for key in ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers"):
        for count in (getattr(part, key, None) for part in configs):
            if isinstance(count, int) and count > len(stored):
                raise damaged(f"got {key} {count}, but the weights file holds only {len(stored)} tensors")
    absent = set(config.linearize.get(ABSENT, ()))
    try:
        with torch.device("meta"):
            empty = model(config)
    except CheckpointError:
        raise
    except Exception as error:
        raise damaged(f"no model can be built from it ({type(error).__name__}: {first_line(error)})") from error
    state = {key: tensor for key, tensor in empty.state_dict().items() if key not in absent}
    named, again = revert_weight_conversion(empty, state), None
    twice = revert_weight_conversion(empty, named)
    if len(stored.keys() & twice.keys()) > len(stored.keys() & named.keys()):
        renamings = (x for x in get_model_conversion_mapping(empty, add_legacy=False) if isinstance(x, WeightRenaming))
        named, again = twice, {x.source_patterns[0]: x.target_patterns[0] for x in renamings}
    renamed = _renamed(state, named)
    # Files may use the model's own names (`save_original_format=False`).
    stored = {key if (name := renamed.get(key, key)) in stored else name: one for key, one in stored.items()}
    stored = {key: tensor for key, tensor in stored.items() if key not in absent}
    optional = _optional(empty, stored.keys(), named.keys(), renamed)
    _compare(stored, named, optional, str(getattr(config, "dtype", None)).removeprefix("torch."))
    # A class may not save weights that it computes (sinusoids); another class then misses them.
    unsaved = _ignored(empty, named.keys() - stored.keys())
    return {key for key in state if renamed.get(key, key) not in unsaved}, again


def check_loaded(model: PreTrainedModel, info: ReadOnlyValues, saved: set[str]) -> None:
    """Check that all weights shared with the saved model were loaded, and as finite numbers.

    transformers fills in missing ones at random.

    Args:
        model: the loaded model; if its head differs from the saved one, the weights of the head are new.
        info: the loading info from transformers.
        saved: names of the weights in the saved model; empty if unknown.

    Raises:
        CheckpointError: if a weight is missing, has the wrong size, was not expected, or is NaN or infinite.
    """
    prefix = f"{model.base_model_prefix}."
    shared = {name.removeprefix(prefix) for name in saved}
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        keys = sorted(str(key) for key in info.get(problem, ()))
        if problem == "unexpected_keys":
            # A model with another head, or without some part, does not have these weights.
            absent = model.config.linearize.get(ABSENT, ())
            whole = bool(saved) and saved <= model.state_dict().keys()
            bad = [key for key in keys if whole and key not in absent]
        else:
            kept = shared if problem == "missing_keys" else ()
            bad = [key for key in keys if ".linear_attention." in key or key.removeprefix(prefix) in kept]
        if bad:
            recorded = (model.config.architectures or [type(model).__name__])[0]
            own, saved_as = (x.removeprefix("Linearized") for x in (type(model).__name__, recorded))
            why = "the checkpoint is incomplete, or the installed transformers reads their names differently: download "
            why += "it again or convert the model again"
            if saved and own != saved_as:
                # The file was compared with the class that it was saved from, so it is complete.
                why = f"{own} reads other names, so they would be random: load it as {saved_as}, which was saved"
            raise CheckpointError(f"weights that config.json asks for were not loaded ({problem}: {some(bad)}); {why}")
    check_numbers(model, unread=set(info.get("missing_keys", ())))


def is_offloaded(model: torch.nn.Module) -> bool:
    """Tell whether the blocks of a model stay in their weights files."""
    return OFFLOADED in vars(model)


def is_streamed(model: torch.nn.Module) -> bool:
    """Tell whether the blocks of an offloaded model run one after the other over all rows."""
    return BLOCKS in vars(model)


def body_prefix(model: PreTrainedModel) -> str:
    """Return the start of the names of all weights but the head's."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device on which a model runs, also if its first weights are in their files."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if not tensor.is_meta:
            return tensor.device
    return torch.device("cpu")


def stored(model: Any, name: str, tensor: Tensor) -> Tensor:
    """Return a weight of a model by its name, read from its file if it is offloaded."""
    if not (tensor.is_meta and is_offloaded(model)):
        return tensor
    from transformers.integrations.accelerate import load_offloaded_parameter

    return load_offloaded_parameter(model, name)


def check_merged(model: torch.nn.Module) -> None:
    """Check that a model has no adapter of peft: it would be saved without its weights, or under names no load knows.

    Raises:
        ConfigError: if it has one.
    """
    held = next((name for name, _ in model.named_modules() if name.endswith(".base_layer")), None)
    if held is not None:
        raise ConfigError(
            f"{type(model).__name__}: got an adapter of peft that is not merged ({held.removesuffix('.base_layer')}), "
            "expected plain weights; merge it first, with merge_and_unload() of peft's own model"
        )


def _renamed(state: Mapping[str, Tensor], named: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names in the file of the weights that are stored unchanged, by their names in the model."""
    stored_as = {id(tensor): key for key, tensor in named.items()}
    return {key: stored_as[id(tensor)] for key, tensor in state.items() if id(tensor) in stored_as}


def take_stored_names(model: PreTrainedModel, state: dict[str, Tensor], prefix: str, *args: object) -> None:
    """Before `load_state_dict`, rename weights that come under the names used in files.

    transformers renames weights when it saves and loads (as for ViT), but its Trainer passes a checkpoint's file on
    unchanged and ignores unknown names: a resumed run would continue with other weights, without warning.
    """
    own = model.state_dict()
    if all(name.removeprefix(prefix) in own for name in state if name.startswith(prefix)):
        return
    for name, stored in _renamed(own, revert_weight_conversion(model, dict(own))).items():
        if prefix + stored in state and prefix + name not in state:
            state[prefix + name] = state.pop(prefix + stored)


def absent_weights(model: PreTrainedModel) -> list[str]:
    """List the weights that the class would build from the config but the model lacks, or the other way round.

    Examples are the pooler of `BertModel(config, add_pooling_layer=False)` and the mask token of
    `ViTModel(config, use_mask_token=True)`: they do not follow from config.json. As with a softmax checkpoint, loading
    initialises them again or leaves them out, with transformers' warning.

    Raises:
        CheckpointError: if the config describes a model that a load refuses.
    """
    try:
        with torch.device("meta"):
            whole = type(model)(copy.deepcopy(model.config))
    except CheckpointError as error:
        raise CheckpointError(f"{type(model).__name__}: the saved model could not be loaded: {error}") from None
    except Exception:
        # The class cannot be built from its config alone, so loading cannot compare the file with it either.
        return []
    names = whole.state_dict().keys() ^ model.state_dict().keys()
    return sorted(name for name in names if ".linear_attention." not in f".{name}")


def _optional(model: PreTrainedModel, stored: Set[str], expected: Set[str], renamed: Mapping[str, str]) -> set[str]:
    """Return the names that may be missing in the file or the model: a file holds only one of a set of tied tensors.

    Names in the file may differ from those in the model (`renamed`), as for PaliGemma's tied head.
    """
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    pairs = {renamed.get(target, target): renamed.get(source, source) for target, source in tied.items()}
    groups: dict[str, set[str]] = {}
    for target, source in pairs.items():
        groups.setdefault(source, {source}).add(target)
    optional = {name for group in groups.values() if group & stored for name in group}
    ignored = _ignored(model, stored | expected)
    return optional | {name for name in ignored if not any(name in group for group in groups.values())}


def _ignored(model: PreTrainedModel, names: Set[str]) -> set[str]:
    attributes = ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save")
    patterns = [re.compile(pattern) for key in attributes for pattern in getattr(model, key, None) or ()]
    return {name for name in names if any(pattern.search(name) for pattern in patterns)}


def _compare(stored: Mapping[str, Stored], named: Mapping[str, Tensor], optional: set[str], dtype: str) -> None:
    """Check that stored tensors have the model's names, sizes and types: loading would cast other types silently.

    Floating point weights may have any type in `FLOATS`. Kernels are saved in fp32, unless the whole model was cast
    (`model.half().save_pretrained`), in which case config.json names that type too.
    """
    missing = sorted(named.keys() - stored.keys() - optional)
    extra = sorted(stored.keys() - named.keys() - optional)
    both = sorted(stored.keys() & named.keys())
    other = [key for key in both if stored[key][0] != named[key].shape]
    advice = "config.json and the weights do not belong together: download the checkpoint again or convert again"
    if missing:
        raise CheckpointError(f"the weights file lacks {some(missing)}, which config.json asks for; {advice}")
    if extra:
        raise CheckpointError(f"the weights file holds {some(extra)}, which config.json does not know; {advice}")
    if other:
        key = other[0]
        raise CheckpointError(
            f"the weights file has {some(other)} in a different size than config.json asks for ({key}: got "
            f"{list(stored[key][0])}, expected {list(named[key].shape)}); {advice}"
        )
    for key in both:
        got = stored[key][1]
        if not named[key].is_floating_point():
            good, expected = got not in FLOATS and not got.startswith("F8"), "whole numbers or true and false"
        elif ".linear_attention." in key:
            good, expected = got == "F32" or (got in FLOATS and FLOATS[got] == dtype), "F32"
        else:
            good, expected = got in FLOATS, f"one of {', '.join(FLOATS)}"
        if not good:
            raise CheckpointError(
                f"the weights file holds {key!r} as {got}, expected {expected} (config.json says dtype {dtype}); the "
                "file was changed after it was written: download the checkpoint again or convert again"
            )


def check_numbers(model: torch.nn.Module, owner: str = "the weights file", unread: Set[str] = frozenset()) -> None:
    """Check that loaded weights are finite numbers.

    Args:
        model: the model; its floating point parameters and kernel buffers are read if they are in memory.
        owner: name of the source of the weights in the error.
        unread: names of weights that are not from that source; some classes leave them as memory was.

    Raises:
        CheckpointError: if a tensor holds NaN or infinity; the message names the first.
    """
    tensors = [*model.named_parameters(), *(x for x in model.named_buffers() if "linear_attention." in x[0])]
    kinds, bad = (torch.float64, torch.float32, torch.bfloat16, torch.float16), []
    for name, tensor in tensors:
        tensor = stored(model, name, tensor) if tensor.is_meta else tensor
        if tensor.is_meta or tensor.numel() == 0 or tensor.dtype not in kinds or name in unread:
            continue
        # Quantised tensors of torchao hold integers and scales.
        with contextlib.suppress(NotImplementedError):
            # One pass without another tensor of that size: if there is a NaN, both minimum and maximum are NaN.
            if not all(map(torch.isfinite, torch.aminmax(tensor.detach()))):
                bad.append(name)
    if bad:
        raise CheckpointError(
            f"{owner} holds NaN or infinity in {some(sorted(bad))}, expected finite numbers; the training that wrote "
            "it diverged, or the file is damaged: use an earlier checkpoint or download it again"
        )


def with_variant(file: str, variant: str | None) -> str:
    """Return the name of a weights file or an index with a variant, as transformers writes it."""
    stem, dot, ending = file.rpartition(".")
    return f"{stem}.{variant}{dot}{ending}" if variant else file


def read_header(name: str | os.PathLike[str], variant: str | None = None, **hub: Any) -> dict[str, Stored] | None:
    """Return the names, shapes and types of all tensors in a checkpoint, after checking that no file is truncated.

    Args:
        name: folder, or name on the Hub.
        variant: as in `check_weights`.
        **hub: those of `HUB_OPTIONS` that the caller gave to `from_pretrained`.

    Returns:
        The stored tensors by name; None if the weights are not in safetensors files with the usual names.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """
    single = find_file(name, with_variant(SINGLE, variant), hub)
    if single is not None:
        return _file_header(single)
    index = find_file(name, with_variant(INDEX, variant), hub)
    if index is None:
        folder = os.path.join(name, hub.get("subfolder") or "")
        endings = (".safetensors", ".bin", ".index.json")
        if os.path.isdir(folder) and not any(file.endswith(endings) for file in os.listdir(folder)):
            raise CheckpointError(f"{str(name)!r} has no weights file ({SINGLE}); copy or download it again")
        return None
    try:
        with open(index, encoding="utf-8") as handle:
            shards = set(json.load(handle)["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{INDEX} cannot be read ({first_line(error)}); download the checkpoint again") from None
    for shard in shards:
        if not isinstance(shard, str) or os.path.basename(shard) != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{INDEX} names {shard!r}, expected safetensors files next to it; the file was edited"
            )
    header: dict[str, Stored] = {}
    for shard in sorted(shards):
        path = find_file(name, shard, hub)
        if path is None:
            raise CheckpointError(f"the weights file {shard!r} is missing; download the checkpoint again")
        header |= _file_header(path)
    return header


def find_file(name: str | os.PathLike[str], file: str, hub: Values) -> str | None:
    """Return the path of a file in a checkpoint, downloading it if needed; None if there is no such file."""
    silent = ("gated_repo", "missing_entries", "connection_errors")
    return cached_file(name, file, **{f"_raise_exceptions_for_{what}": False for what in silent}, **hub)


def _file_header(path: str) -> dict[str, Stored]:
    """Return a file's header, which safetensors checks against the file size without reading weights."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            return {key: (tuple(part.get_shape()), str(part.get_dtype())) for key, part in slices.items()}
    except (OSError, SafetensorError):
        raise CheckpointError(
            f"the weights file {os.path.basename(path)!r} is cut off or damaged; download it again"
        ) from None
