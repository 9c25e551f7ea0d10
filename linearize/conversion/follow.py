"""Set a field of a config, and everything in the model that depends on it, for any architecture.

There is no list per model: the model's class is built twice on the meta device, with the old and the new value, and
what differs between the two has to change. A difference of an unknown kind is an error, raised before any change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.core.errors import UnsupportedModelError

# (name of the table, its values, the class's own values if it is a formula, new shape) -> new values
Resize = Callable[[str, Tensor, Tensor | None, torch.Size], Tensor]


def refusal(model: nn.Module, why: str, do: str = "leave the option out") -> UnsupportedModelError:
    """Return the error of a model that is not changed."""
    return UnsupportedModelError(f"got {type(model).__name__}, {why}; {do}")


def stray(model: nn.Module, name: str, field: str) -> UnsupportedModelError:
    """Return the error of a tensor that depends on the field in an unknown way, or not at all."""
    return refusal(model, f"whose {name} does not follow config.{field} as a table of absolute positions would")


def follow(
    model: PreTrainedModel, field: str, value: object, resize: Resize, expected: Collection[str] = ()
) -> tuple[str, ...]:
    """Set a config field and everything that depends on it; work everything out first, then write.

    Returns:
        Names of the replaced tensors, and of the field.

    Raises:
        UnsupportedModelError: something unknown depends on the field, or an `expected` tensor does not.
    """
    old, new = _twin(model, field, getattr(model.config, field)), _twin(model, field, value)
    before, after, mine = dict(_tensors(old)), dict(_tensors(new)), dict(_tensors(model))
    live = {n: mine[n].detach() for n in sorted(before.keys() & mine.keys()) if before[n].shape != after[n].shape}
    if missing := sorted(set(expected) - live.keys()):
        raise stray(model, missing[0], field)
    for name, tensor in live.items():
        if tensor.shape != before[name].shape:
            why = f"with {name} of shape {tuple(tensor.shape)}, expected {tuple(before[name].shape)} from its config"
            raise refusal(model, why, "correct the config")
    was, fresh = _refill(old, live), _refill(new, live)
    tensors = {}
    for name, tensor in live.items():
        formula = fresh[name].to(tensor.device) if torch.equal(was[name], tensor.cpu()) else None
        if isinstance(mine[name], nn.Parameter):
            tensors[name] = resize(name, tensor, formula, after[name].shape)
        elif formula is None:
            raise stray(model, name, field)
        else:
            tensors[name] = formula
    numbers = list(_numbers(model, field, old, new))
    _write(model, tensors, numbers, field, value)
    return (*tensors, f"config.{field}")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _twin(model: PreTrainedModel, field: str, value: object) -> PreTrainedModel:
    """Build the model's class from its config with one field set, on the meta device."""
    config = copy.deepcopy(model.config)
    try:
        setattr(config, field, value)
        with torch.device("meta"):
            return type(model)(config)
    except Exception as error:  # Other people's constructors: any of them may fail, in any way.
        why = " ".join(str(error).split())
        raise refusal(model, f"which cannot be built with config.{field} = {value} ({why})") from error


def _refill(twin: PreTrainedModel, live: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the values that the class initialises the named tensors with, in the dtypes of `live`."""
    owners = {}
    for name, tensor in live.items():
        path, _, leaf = name.rpartition(".")
        owner = owners[path] = twin.get_submodule(path)
        value = torch.full(getattr(owner, leaf).shape, 7, dtype=tensor.dtype)  # 7: nothing was written
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
                raise refusal(model, f"whose {path}.{key} (a scale, as of rope) follows config.{field}")
            if getattr(mine[path], key, None) == value:
                yield mine[path], key, vars(twins[path])[key]


def _write(
    model: PreTrainedModel,
    tensors: dict[str, Tensor],
    numbers: list[tuple[nn.Module, str, object]],
    field: str,
    value: object,
) -> None:
    shared: dict[int, nn.Parameter] = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        old = getattr(owner, leaf)
        if isinstance(old, nn.Parameter):
            tensor = shared.setdefault(id(old), nn.Parameter(tensor, requires_grad=old.requires_grad))
        setattr(owner, leaf, tensor)
    for module, key, number in numbers:
        setattr(module, key, number)
    was = getattr(model.config, field)
    # Parts of a model may keep a copy of its config.
    for config in {id(c): c for c in (getattr(module, "config", None) for module in model.modules())}.values():
        if type(config) is type(model.config) and getattr(config, field) == was:
            setattr(config, field, value)
