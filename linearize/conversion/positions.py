"""Let a pretrained model take longer inputs than it was trained on: longer texts, larger images.

Everything that depends on the length is found and changed (`_follow`):

- learned tables of positions: tiled (as Longformer starts from RoBERTa, https://arxiv.org/abs/2004.05150, section 5) or
  stretched; rows kept for padding (RoBERTa, MPNet) or for an offset (BART, OPT) stay where they are;
- tables of patches: interpolated bicubically in fp32, as transformers' own `interpolate_pos_encoding` does
  (timm models: by their own `set_input_size`);
- values of a formula (sinusoidal tables, `position_ids`, causal masks): the values that the class itself computes;
- numbers stored in modules (`num_embeddings`, `image_size`, `max_seq_len_cached`).

Any other dependence is an error, raised before any change. Rotary frequencies stay (no scaling). Parameters are
replaced, so build the optimizer afterwards.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from linearize.attention.cache import text_config
from linearize.conversion.inputs import set_length
from linearize.core.errors import ConfigError, UnsupportedModelError, unknown_name
from linearize.core.heads import Processor
from linearize.modeling.compat import configs_of

_TABLE = re.compile(r"(?:.*\.)?(?:wpe|positions?_emb\w*|embed_positions?|pos_emb\w*)(?:\.weight)?")
# No known table keeps more rows than this before position 0: a larger surplus means another table.
_MOST_RESERVED = 8
# Attributes for tokens whose rows come before the patches in an image model's table.
_PREFIX_TOKENS = ("cls_token", "class_embedding", "distillation_token")
# Model types whose own interpolation is antialiased.
_ANTIALIASED = frozenset({"dinov2_with_registers"})
_LENGTH, _IMAGE = "max_position_embeddings", "image_size"


@dataclass(frozen=True)
class PositionReport:
    """How a model was changed to take longer inputs.

    Attributes:
        old_length: tokens the model took before.
        new_length: tokens it takes now (image models: patches, class, distillation and register tokens).
        method: "tile" or "interpolate" for texts; "bicubic" for images.
        changed: dotted names of the replaced tensors, and `config.<field>`; empty if nothing had to change.
        note: one line for the user.
        image_size: height and width in pixels that an image model takes now.
    """

    old_length: int
    new_length: int
    method: str
    changed: tuple[str, ...]
    note: str
    image_size: tuple[int, int] | None = None


def current_length(model: nn.Module) -> int | None:
    """Return how many tokens a transformers or timm model takes now; None if unlimited or unknown.

    RoBERTa's 514 rows hold 512 tokens; image models count every token.
    """
    if (timm := _timm(model)) is not None:
        image = _image(model) if isinstance(getattr(timm, "pos_embed", None), Tensor) else None
        return None if image is None else math.prod(image.grid) + getattr(timm, "num_prefix_tokens", 0)
    if not isinstance(model, PreTrainedModel) or _parts(model):
        return None
    if model.main_input_name == "pixel_values":
        rows = [table.shape[-2] for name, table in model.named_parameters() if _TABLE.fullmatch(name)]
        return rows[0] + (getattr(model.config, "num_register_tokens", None) or 0) if rows and _image(model) else None
    limit = getattr(model.config, _LENGTH, None)
    if model.main_input_name != "input_ids" or not isinstance(limit, int) or limit < 1:
        return None
    return min((table.num_embeddings - _reserved(table, limit) for table in _tables(model).values()), default=limit)


def text_length(model: PreTrainedModel) -> int | None:
    """Return what `current_length` does; of a composite model (CLIP) what its text part takes."""
    return current_length(model) or getattr(text_config(model.config), _LENGTH, None)


def current_image_size(model: nn.Module) -> tuple[int, int] | None:
    """Return the image size, height and width in pixels, that an image model takes now; None for other models."""
    image = _image(model)
    return None if image is None else image.size


def tokens_of_image_size(model: nn.Module, image_size: int) -> int:
    """Return the number of tokens in a square image of `image_size` pixels a side, for `extend_positions`.

    Raises:
        ConfigError: the size is smaller than the current one, or not a multiple of the patch size.
        UnsupportedModelError: the model is not an image model, or its positions are of an unknown kind.
    """
    return _with_image_size(model, image_size)[3]


def runs_beyond_limit(model: nn.Module) -> bool:
    """Tell whether a text model can read more tokens than its config says: its positions are rotary, not in a table."""
    if not isinstance(model, PreTrainedModel) or current_length(model) is None or _tables(model):
        return False
    return not _named_positions(model) and _is_rotary(model)


def extend_positions(model: nn.Module, max_length: int, *, method: str = "tile") -> PositionReport:
    """Let a model take inputs of up to `max_length` tokens, changing it and its config in place.

    Args:
        model: any transformers model, with or without a head, or a timm one.
        max_length: tokens; image models get the smallest square with at least that many patches.
        method: for learned tables of texts: "tile" repeats the trained rows, so that inputs of the old length give
            the same output, bit for bit; "interpolate" stretches them linearly, and keeps the first and last row.

    Raises:
        ConfigError: `max_length` is not a whole number, or is below what the model takes now; `method` is unknown.
        UnsupportedModelError: the model has no limit, or one of an unknown kind.
    """
    if type(max_length) is not int or max_length < 1:
        raise ConfigError(f"got max_length {max_length!r}, expected a whole number of tokens, 1 or more")
    if method not in METHODS:
        raise unknown_name("position method", method, METHODS)
    length, image = current_length(model), _image(model)
    if length is None:
        raise _no_length(model)
    if max_length < length:
        raise ConfigError(
            f"max_length: got {max_length}, but the model already takes {length}; choose a larger one or leave it out"
        )
    if image is not None:
        patches = max_length - (length - math.prod(image.grid))
        side = math.isqrt(max(patches, 1) - 1) + 1
        square = side * image.patch[0], side * image.patch[1]
        return extend_image_size(model, image.size if max_length == length else square)
    if max_length == length:
        return PositionReport(length, length, method, (), f"the model already takes {length} tokens")
    assert isinstance(model, PreTrainedModel)
    return _extend_text(model, length, max_length, method)


def extend_image_size(model: nn.Module, image_size: int | tuple[int, int]) -> PositionReport:
    """Let an image model take larger images, changing it and its config in place.

    Args:
        model: a transformers image model with a table of positions, or a timm model with `set_input_size`.
        image_size: pixels, one number for a square or (height, width); multiples of the patch size.

    Raises:
        ConfigError: the size is smaller than the current one, or not a multiple of the patch size.
        UnsupportedModelError: the model is not an image model, or its positions are of an unknown kind.
    """
    old, new, length, tokens = _with_image_size(model, image_size)
    if new == old:
        return PositionReport(length, length, "bicubic", (), f"the model already takes {old.size} pixels", old.size)
    changed = (_extend_images if _timm(model) is None else _extend_timm)(model, old, new)
    note = f"{new.size} instead of {old.size} pixels: the table of patches was interpolated"
    return PositionReport(length, tokens, "bicubic", changed, note, new.size)


def extend_processor(processor: Processor, length: PositionReport | int, model: nn.Module) -> Processor:
    """Let the tokenizer or image processor of an extended model make longer inputs.

    Args:
        processor: tokenizer, image processor, or a processor holding both (the one `model` needs is changed in place).
        length: report of `extend_positions`, or a number of tokens (an image processor takes its size from `model`).
        model: the extended model.

    Returns:
        The same `processor`.

    Raises:
        ConfigError: the processor is not the kind that the model needs, or its size is of an unknown kind.
    """
    image = _image(model)
    wanted = "tokenizer" if image is None else "image_processor"
    part: Any = getattr(processor, wanted, None) if isinstance(processor, ProcessorMixin) else processor
    if image is None and isinstance(part, PreTrainedTokenizerBase):
        set_length(part, length.new_length if isinstance(length, PositionReport) else length)
    elif image is not None and hasattr(part, "data_config"):  # timm's transforms are built once, from its config
        config = {**part.data_config, "input_size": (part.data_config["input_size"][0], *image.size)}
        part.__dict__.update(type(part)(config, architecture=getattr(part, "architecture", None)).__dict__)
    elif image is not None and getattr(part, "size", None):
        old, crop = dict(part.size), dict(getattr(part, "crop_size", None) or {})
        base = crop if crop and getattr(part, "do_center_crop", True) is not False else old
        height, width = (base.get(key, base.get("shortest_edge")) for key in ("height", "width"))
        if not height or not width or not old.keys() <= {"height", "width", "shortest_edge", "longest_edge"}:
            raise ConfigError(f"got a processor with size {old}, expected height and width, or shortest_edge")
        # A size larger than the crop (256 for a crop of 224) keeps its ratio to the crop.
        scale = {"height": image.size[0] / height, "width": image.size[1] / width}
        edge = min(image.size) / min(height, width)
        part.size = type(part.size)(**{key: round(n * scale.get(key, edge)) for key, n in old.items()})
        if crop:
            part.crop_size = type(part.crop_size)(height=image.size[0], width=image.size[1])
    else:
        raise ConfigError(f"got {type(processor).__name__}, expected the {wanted} of {type(model).__name__}")
    return processor


def _tables(model: PreTrainedModel) -> dict[str, nn.Embedding]:
    limit = getattr(model.config, _LENGTH)
    return {
        f"{name}.weight": module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Embedding)
        and _TABLE.fullmatch(name)
        and 0 <= module.num_embeddings - limit <= _MOST_RESERVED
    }


def _reserved(table: nn.Embedding, limit: int) -> int:
    """Count the rows before position 0: RoBERTa's start after the padding row, BART's and OPT's at an offset."""
    return table.num_embeddings - limit if table.padding_idx is None else table.padding_idx + 1


def _extend_text(model: PreTrainedModel, length: int, max_length: int, method: str) -> PositionReport:
    limit, tables = getattr(model.config, _LENGTH), _tables(model)
    note = f"learned positions, {method}: {length:,} trained rows become {max_length:,}"
    if not tables:
        if named := _named_positions(model):
            raise _stray(model, named[0], _LENGTH)
        for name, module in model.named_modules():
            kind = getattr(module, "rope_type", None)
            # Dynamic scaling sets in beyond config.max_position_embeddings: raising that would switch the scaling off.
            if "dynamic" in (kind.values() if isinstance(kind, dict) else (kind,)):
                raise _refusal(model, f"with dynamic rope scaling ({name}), which takes longer inputs as it is")
        note = f"no table; config.{_LENGTH} raised"
        note += ", rotary frequencies unchanged (no rope scaling)" if _is_rotary(model) else ""

    def grow(name: str, table: Tensor, formula: Tensor | None, shape: torch.Size) -> Tensor:
        nonlocal note
        if name not in tables or shape[0] - len(table) != max_length - length:
            raise _stray(model, name, _LENGTH)
        if formula is not None:
            note = "sinusoidal rows continued by their formula"
            return formula
        kept = _reserved(tables[name], limit)
        return torch.cat([table[:kept], METHODS[method](table[kept:], shape[0] - kept)])

    changed = _follow(model, _LENGTH, limit + max_length - length, grow, tables.keys())
    return PositionReport(length, max_length, method, changed, note)


def _stretch(rows: Tensor, count: int) -> Tensor:
    """Interpolate linearly between the trained rows, [N, D] -> [count, D]; first and last row are kept exactly."""
    new = F.interpolate(rows.float().T[None], size=count, mode="linear", align_corners=True)[0].T.to(rows.dtype)
    new[0], new[-1] = rows[0], rows[-1]
    return new


METHODS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "tile": lambda rows, count: rows.repeat(-(-count // len(rows)), 1)[:count],
    "interpolate": _stretch,
}
"""Ways to extend a learned table of positions, [N, D] -> [count, D]: repeat its trained rows, or interpolate."""


def _named_positions(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if "position_embedding" in name]


def _is_rotary(model: nn.Module) -> bool:
    """Tell whether a module of the model rotates queries and keys by their positions."""
    return any(
        hasattr(module, "inv_freq") or hasattr(module, "rotary_dim") or "rotary" in type(module).__name__.lower()
        for module in model.modules()
    )


class _Image(NamedTuple):
    size: tuple[int, int]
    patch: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int]:
        return self.size[0] // self.patch[0], self.size[1] // self.patch[1]


def _image(model: nn.Module) -> _Image | None:
    """Return the image and patch size, in pixels, of an image model; None for other models."""
    timm = _timm(model)
    if timm is not None:
        embed = getattr(timm, "patch_embed", None)
        size, patch = getattr(embed, "img_size", None), getattr(embed, "patch_size", None)
    elif getattr(model, "main_input_name", None) == "pixel_values":
        size, patch = getattr(model.config, _IMAGE, None), getattr(model.config, "patch_size", None)
    else:
        return None
    try:
        return _Image(_pair(size), _pair(patch))
    except ConfigError:  # None, or the three sides of a video.
        return None


def _timm(model: nn.Module) -> Any:
    """Return the timm model in `model` (bare, or in a TimmWrapper); None for other models."""
    inner = getattr(model, "timm_model", model)
    return inner if not isinstance(inner, PreTrainedModel) and hasattr(inner, "pretrained_cfg") else None


def _pair(size: object) -> tuple[int, int]:
    pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2 or not all(type(side) is int and side > 0 for side in pair):
        raise ConfigError(f"got size {size!r}, expected pixels: a whole number or (height, width)")
    return pair


def _with_image_size(model: nn.Module, image_size: int | tuple[int, int]) -> tuple[_Image, _Image, int, int]:
    """Return the current and the new image size, and the tokens of both; raise as `extend_image_size` does."""
    old, length = _image(model), current_length(model)
    if old is None and length is not None:
        raise _refusal(model, "which reads no images", "give max_length, in tokens")
    if old is None or length is None:
        raise _no_length(model)
    new = old._replace(size=_pair(image_size))
    if any(n % p or n < o for n, p, o in zip(new.size, old.patch, old.size, strict=True)):
        raise ConfigError(f"got image size {new.size}, expected multiples of {old.patch}, not below {old.size}")
    return old, new, length, length - math.prod(old.grid) + math.prod(new.grid)


def _extend_images(model: Any, old: _Image, new: _Image) -> tuple[str, ...]:
    square = new.grid[0] == new.grid[1]

    def resize(name: str, table: Tensor, formula: Tensor | None, shape: torch.Size) -> Tensor:
        owner = model.get_submodule(name.removesuffix(".weight").rpartition(".")[0])
        prefix = sum(getattr(owner, token, None) is not None for token in _PREFIX_TOKENS)
        expected = prefix + math.prod(old.grid), prefix + math.prod(new.grid)
        if not _TABLE.fullmatch(name) or (table.shape[-2], shape[-2]) != expected:
            raise _stray(model, name, _IMAGE)
        # DINOv2 interpolates for every image, and assumes a square table.
        always = "interpolate_pos_encoding" not in inspect.signature(owner.forward).parameters
        if always and not square and hasattr(owner, "interpolate_pos_encoding"):
            raise _refusal(model, f"whose table is always a square, and image size {new.size}", "give one number")
        rows = table.reshape(table.shape[-2:])
        grid = rows[prefix:].float().reshape(1, *old.grid, -1).permute(0, 3, 1, 2)
        smooth = model.config.model_type in _ANTIALIASED
        grid = F.interpolate(grid, size=new.grid, mode="bicubic", align_corners=False, antialias=smooth)
        return torch.cat([rows[:prefix], grid.flatten(2)[0].T.to(rows.dtype)]).reshape(shape)

    # A number stays a number if possible (CLIP's config takes nothing else), and a list stays a list.
    was = model.config.image_size
    value = type(was)(new.size) if not isinstance(was, int) else new.size[0] if square else new.size
    expected = [name for name, _ in model.named_parameters() if _TABLE.fullmatch(name)]
    return _follow(model, _IMAGE, value, resize, expected)


def _extend_timm(model: Any, old: _Image, new: _Image) -> tuple[str, ...]:
    timm = _timm(model)
    if not hasattr(timm, "set_input_size"):
        raise _refusal(timm, "a timm model without set_input_size")
    timm.set_input_size(img_size=new.size)
    changed = tuple(name for name, tensor in model.named_parameters() if tensor is timm.pos_embed)
    if model is timm:
        return changed
    # The wrapper builds the timm model, and its image processor, from these when it is loaded again.
    model.config.model_args = {**(model.config.model_args or {}), "img_size": list(new.size)}
    source = getattr(model.config, "pretrained_cfg", None)
    if source and "input_size" in source:
        model.config.pretrained_cfg = {**source, "input_size": [source["input_size"][0], *new.size]}
    return (*changed, "config.model_args")


# (name of the table, its values, the class's own values if it is a formula, new shape) -> new values
_Resize = Callable[[str, Tensor, Tensor | None, torch.Size], Tensor]


def _follow(
    model: PreTrainedModel, field: str, value: object, resize: _Resize, expected: Collection[str]
) -> tuple[str, ...]:
    """Set a config field and everything that depends on it; compute everything first, then write.

    No list per model is needed: the model's class is built twice on the meta device, with the old and the new value,
    and whatever differs between the two must change. Unknown kinds of differences raise an error first.

    Returns:
        Names of the replaced tensors, and of the field.

    Raises:
        UnsupportedModelError: something unknown depends on the field, or an `expected` tensor does not.
    """
    old_value = getattr(model.config, field)
    old, new = _twin(model, field, old_value), _twin(model, field, value)
    before, after, current = dict(_tensors(old)), dict(_tensors(new)), dict(_tensors(model))
    live = {n: current[n].detach() for n in sorted(before.keys() & current.keys()) if before[n].shape != after[n].shape}
    if missing := sorted(set(expected) - live.keys()):
        raise _stray(model, missing[0], field)
    for name, tensor in live.items():
        if tensor.shape != before[name].shape:
            why = f"with {name} of shape {tuple(tensor.shape)}, expected {tuple(before[name].shape)} from its config"
            raise _refusal(model, why, "correct the config")
    was, fresh = _refill(old, live), _refill(new, live)
    tensors = {}
    for name, tensor in live.items():
        formula = fresh[name].to(tensor.device) if torch.equal(was[name], tensor.cpu()) else None
        if isinstance(current[name], nn.Parameter):
            tensors[name] = resize(name, tensor, formula, after[name].shape)
        elif formula is None:
            raise _stray(model, name, field)
        else:
            tensors[name] = formula
    numbers = list(_numbers(model, field, old, new))
    # Nothing has been changed so far.
    shared: dict[int, nn.Parameter] = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        parameter = getattr(owner, leaf)
        if isinstance(parameter, nn.Parameter):
            tensor = shared.setdefault(id(parameter), nn.Parameter(tensor, requires_grad=parameter.requires_grad))
        setattr(owner, leaf, tensor)
    for module, key, number in numbers:
        setattr(module, key, number)
    # Parts of a model may keep a copy of its config.
    for config in configs_of(model):
        if type(config) is type(model.config) and getattr(config, field) == old_value:
            setattr(config, field, value)
    return (*tensors, f"config.{field}")


def _twin(model: PreTrainedModel, field: str, value: object) -> PreTrainedModel:
    """Build the model's class from its config with one field set, on the meta device."""
    config = copy.deepcopy(model.config)
    try:
        setattr(config, field, value)
        with torch.device("meta"):
            return type(model)(config)
    except Exception as error:  # Third-party constructors may fail in any way.
        why = " ".join(str(error).split())
        raise _refusal(model, f"which cannot be built with config.{field} = {value} ({why})") from error


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _refill(twin: PreTrainedModel, live: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the values that the class initialises the named tensors with, in the dtypes of `live`."""
    owners = {}
    for name, tensor in live.items():
        path, _, leaf = name.rpartition(".")
        owner = owners[path] = twin.get_submodule(path)
        value = torch.full(getattr(owner, leaf).shape, 7, dtype=tensor.dtype)  # 7 marks values that are never written
        setattr(owner, leaf, nn.Parameter(value, requires_grad=False) if leaf in owner._parameters else value)
    parents = {path.rpartition(".")[0] for path in owners}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for path in chain(owners, sorted(parents, key=len, reverse=True)):  # children first, as transformers does
            around = [m for n, m in twin.named_modules() if not n or f"{path}.".startswith(f"{n}.")]
            [m for m in around if isinstance(m, PreTrainedModel)][-1]._init_weights(around[-1])
    return {name: twin.get_parameter_or_buffer(name).detach() for name in live}


def _numbers(model: nn.Module, field: str, old: nn.Module, new: nn.Module) -> Iterator[tuple[nn.Module, str, object]]:
    """Yield (module, attribute, new value) for the whole numbers that differ between the twins."""
    twins, mine = dict(new.named_modules()), dict(model.named_modules())
    for path, module in old.named_modules():
        for key, value in vars(module).items() if path in mine else ():
            numbers = value if isinstance(value, (tuple, list)) else (value,)
            if not all(isinstance(n, (int, float)) for n in numbers) or value == vars(twins[path])[key]:
                continue
            if any(isinstance(n, float) for n in numbers):
                raise _refusal(model, f"whose {path}.{key} (a scale, as of rope) follows config.{field}")
            if getattr(mine[path], key, None) == value:
                yield mine[path], key, vars(twins[path])[key]


def _no_length(model: nn.Module) -> UnsupportedModelError:
    if parts := ", ".join(_parts(model)):
        return _refusal(model, f"composed of parts ({parts})", "extend the part itself")
    why = f"with neither a table of positions nor a config.{_LENGTH}: without a limit, or with one of an unknown kind"
    return _refusal(model, why)


def _parts(model: nn.Module) -> list[str]:
    """Return the names of the parts' configs (text, image ...) in a composite model."""
    config = getattr(model, "config", None)
    return [name for name in sorted(getattr(config, "sub_configs", ())) if getattr(config, name, None) is not None]


def _refusal(model: nn.Module, why: str, do: str = "leave the option out") -> UnsupportedModelError:
    """Return the error for a model that cannot be extended."""
    return UnsupportedModelError(f"got {type(model).__name__}, {why}; {do}")


def _stray(model: nn.Module, name: str, field: str) -> UnsupportedModelError:
    """Return the error for a tensor that depends on the field in an unknown way, or not at all."""
    return _refusal(model, f"whose {name} does not follow config.{field} as a table of absolute positions would")
