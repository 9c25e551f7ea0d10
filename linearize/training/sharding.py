"""FSDP 2: a copy of a model that is sharded over the processes.

No process ever holds the copy as a whole: it is made without memory, and each process then reads its parts from the
given model, whose weights may be in their files (`linearize.modeling.offload`). accelerate's own ways need the whole
model in the first process (`cpu_ram_efficient_loading`) or in each, and transformers' (`DistributedConfig`, from 5.24)
has a plan for few classes and shards before low-rank updates are added.

In stage two the copy has the precision of a run in one process: trained weights in fp32, passes under autocast, and
gradients that are added up in fp32.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Container, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    broadcast,
    broadcast_object_list,
    fsdp2_prepare_model,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions
from linearize.checkpoint.save import LEAST_SHARD
from linearize.core.errors import ConfigError
from linearize.modeling.offload import in_memory_from_now, is_changed, put, tie, without_hooks
from linearize.modeling.weights import device_of, stored
from linearize.training.precision import to_fp32
from linearize.training.processes import is_main, several, under_fsdp

MOMENTS, RATES = "optimizer.pt", "scheduler.pt"
"""Files of the states of the optimizer and of its schedule, with transformers' names."""
REFUSED = ("FSDP_ACTIVATION_CHECKPOINTING", "FSDP_OFFLOAD_PARAMS", "FSDP_IGNORED_MODULES")
"""Settings of `accelerate config` that the alignment and stage two refuse."""


def check_settings(stage: str, precision: str) -> None:
    """Refuse the settings of FSDP that a stage does not support.

    Args:
        stage: its name, for messages.
        precision: the precision that the options ask for.

    Raises:
        ConfigError: for fp16, whose loss would have to be scaled, or a setting in `REFUSED`.
    """
    for name in REFUSED:
        if (value := os.environ.get(name, "")).lower() not in ("", "0", "false", "none"):
            setting = name.removeprefix("FSDP_").lower()
            raise ConfigError(f"{stage}: got {setting}={value} under FSDP, expected it to be left out; leave it out")
    if "fp16" in (precision, os.environ.get("ACCELERATE_MIXED_PRECISION")):
        raise ConfigError(f"{stage}: got fp16 under FSDP, expected bf16 or no; give --precision bf16")


def check_tied(model: PreTrainedModel) -> None:
    """Refuse a model with tied weights, other than those of the embedding and the head: FSDP 2 would train them apart.

    Raises:
        ConfigError: naming them.
    """
    tie(model)
    together = {id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    owners: dict[nn.Parameter, dict[str, int]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            owners.setdefault(parameter, {})[name] = id(module)
    for names in owners.values():
        if len(names) > 1 and not together.issuperset(names.values()):
            raise ConfigError(unshardable(type(model).__name__, f"{' and '.join(names)} are one weight"))


def start_fsdp(accelerator: Accelerator, blocks: Iterable[str] | None = None) -> None:
    """Let accelerate shard models, also on CPUs, where its own configuration does not, and use sharded ones.

    Args:
        accelerator: an Accelerate object.
        blocks: names of the classes that are gathered on their own; None if the user's settings decide.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin(fsdp_version=2)
    # `fill` reads the weights.
    plugin.cpu_ram_efficient_loading = False
    # accelerate would run kernels and norms in half precision, and add up gradients in it.
    plugin.mixed_precision_policy = None
    if plugin.auto_wrap_policy is None or blocks is not None:
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
    if blocks is not None:
        plugin.transformer_cls_names_to_wrap = sorted(blocks)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    prepare = accelerator.prepare

    def prepared(*given: Any, **options: Any) -> Any:
        if not any(isinstance(one, FSDPModule) for one in given):
            return prepare(*given, **options)
        # An optimizer of a sharded model has its weights. accelerate would look them up by their addresses in memory,
        # which empty parts, such as those of one key head on two devices, do not have.
        made = tuple(accelerator.prepare_optimizer(one) if isinstance(one, Optimizer) else one for one in given)
        return made if len(made) > 1 else made[0]

    vars(accelerator)["prepare"] = prepared


def block_classes(model: PreTrainedModel) -> list[str]:
    """Return the names of the classes that transformers does not split, except embeddings: accelerate shards these."""
    embedding = model.get_input_embeddings()
    modules = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    return sorted({type(module).__name__ for module in modules if embedding not in set(module.modules())})


def sharded(model: PreTrainedModel, accelerator: Accelerator) -> PreTrainedModel:
    """Shard a model over the devices, in place, and return it.

    Raises:
        ConfigError: if FSDP 2 cannot shard it.
    """
    plugin = accelerator.state.fsdp_plugin
    kind = type(model).__name__
    if plugin.transformer_cls_names_to_wrap is None:
        plugin.transformer_cls_names_to_wrap = block_classes(model)
    try:
        result: PreTrainedModel = fsdp2_prepare_model(accelerator, model)
    except (ValueError, TypeError, RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(unshardable(kind, " ".join(str(error).split())[:200])) from error
    return result


def unshardable(kind: str, reason: str) -> str:
    """Return the message about a class of models that FSDP 2 cannot shard."""
    return f"FSDP 2 cannot shard {kind} ({reason}); launch without FSDP, and save memory with low-rank updates (LoRA)"


def empty_copy(model: PreTrainedModel, kernels_on: torch.device | None = None) -> PreTrainedModel:
    """Return a copy of a model whose parameters have no memory; with `kernels_on` it has the model's kernels, there."""
    keep = [] if kernels_on is None else [kernel.to(kernels_on) for kernel in linear_attentions(model).values()]
    tie(model)
    memo: dict[int, object] = {id(module): module for module in keep}
    kept = {id(parameter) for module in keep for parameter in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            empty = torch.empty_like(parameter, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return in_memory_from_now(without_hooks(copy.deepcopy(model, memo), keep))


def part_of(full: Tensor, like: DTensor) -> Tensor:
    """Return this process's part of a weight, which is or will be sharded like another; a view: only it is read."""
    if isinstance(full, DTensor):
        return full.to_local()
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            parts, own = full.chunk(like.device_mesh.size(axis), placement.dim), like.device_mesh.get_local_rank(axis)
            full = parts[own] if own < len(parts) else full.narrow(placement.dim, 0, 0)
    return full


@torch.no_grad()
def fill(
    copied: nn.Module,
    model: nn.Module,
    device: torch.device,
    part: nn.Module | None = None,
    sent: Container[str] = frozenset(),
) -> None:
    """Read the weights of an `empty_copy`, one after the other; of a sharded weight only this process's part.

    Args:
        copied: the copy.
        model: where the weights are, by the same names.
        device: their device in the copy.
        part: the module of the copy whose weights are read, by default all; the others stay without memory.
        sent: names of weights that the main process has, and sends to the others.
    """
    filled: dict[int, nn.Parameter] = {}
    own, inside = model.state_dict(keep_vars=True), set((part or copied).modules())
    for path, module in copied.named_modules():
        for name, empty in module._parameters.items() if module in inside else ():
            if empty is None or not empty.is_meta:
                continue
            if id(empty) not in filled:
                full = f"{path}.{name}" if path else name
                value = torch.empty_like(empty, device=device)
                source = stored(model, full, own[full])
                source = from_main(source, device) if full in sent else source
                if isinstance(value, DTensor):
                    value.to_local().copy_(part_of(source, value))
                else:
                    value.copy_(source)
                filled[id(empty)] = nn.Parameter(value, requires_grad=empty.requires_grad)
            module._parameters[name] = filled[id(empty)]


def from_main(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the main process's values of a tensor that has the same size and dtype in every process."""
    sent: Tensor = broadcast(tensor.to(device) if is_main() else torch.empty_like(tensor, device=device))
    return sent


def in_main(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of a model's weights that only the main process may have: in memory, or changed."""
    own = model.state_dict(keep_vars=True)
    return frozenset(broadcast_object_list([[x for x in own if not own[x].is_meta or is_changed(model, x)]])[0])


def frozen_copy(
    model: PreTrainedModel,
    accelerator: Accelerator,
    dtype: torch.dtype | None = None,
    sent: Container[str] = frozenset(),
    trained: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Return a frozen copy of a model, sharded over the devices, for passes without a gradient.

    Args:
        model: the model; its weights may be in their files.
        accelerator: the processes.
        dtype: dtype of the copy, by default the model's.
        sent: as in `fill`.
        trained: a sharded copy of the model, which has its weights and buffers.
    """
    copied = empty_copy(model).eval().requires_grad_(False)
    if dtype is not None:
        copied.to(dtype=dtype)
    copied = sharded(copied, accelerator)
    for module in copied.modules():
        if isinstance(module, FSDPModule):
            # There is no backward pass to keep weights for.
            module.set_reshard_after_forward(True, recurse=False)
    fill(copied, trained or model, accelerator.device, sent=sent)
    for name, buffer in trained.named_buffers() if trained is not None else ():
        copied.get_buffer(name).copy_(buffer)
    return copied


def whole(tensor: Tensor) -> Tensor:
    """Return a weight of a sharded model, gathered from all processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_gathered(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors into one file or several: the main process gathers one after the other until a file is full.

    All processes call it together, if there are sharded ones.
    """
    files: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if files[-1] and sum(x.nbytes for x in (*files[-1].values(), tensor)) > LEAST_SHARD:
            files.append({})
        files[-1][name] = tensor
    for number, part in enumerate(files, 1):
        found: dict[str, Tensor] = {}
        for name, tensor in part.items():
            full = whole(tensor)
            if is_main():
                found[name] = full.detach().to("cpu", copy=full is not tensor).contiguous()
        if is_main():
            suffix = f"-{number:05}-of-{len(files):05}" if len(files) > 1 else ""
            save_file(found, path.with_stem(path.stem + suffix), {"format": "pt"})


def spread(full: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor in the parts of a sharded one of the same size; unchanged if that one is not sharded."""
    if not isinstance(like, DTensor) or isinstance(full, DTensor):
        return full
    own = part_of(full, like).to(like.device, copy=True)
    return DTensor.from_local(own, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


class Shards:
    """A sharded copy of a model, which is trained, and its weights as they are without FSDP.

    Args:
        model: the model; its weights may be in their files.
        accelerator: the processes.
        in_fp32: whether weights that are not trained are held in fp32 too.

    Attributes:
        model: the copy.
    """

    def __init__(self, model: PreTrainedModel, accelerator: Accelerator, *, in_fp32: bool) -> None:
        copied = empty_copy(model)
        to_fp32(copied, whole=in_fp32)
        self.model, self.accelerator = sharded(copied, accelerator), accelerator
        fill(self.model, model, accelerator.device)

    def _tensors(self) -> dict[str, Tensor]:
        """Return the weights by name; a weight with several names has the first one."""
        first = {name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())}
        return {name: tensor for name, tensor in self.model.state_dict().items() if name in first}

    @torch.no_grad()
    def gather_into(self, model: PreTrainedModel) -> None:
        """Copy what was trained into the given model, one weight after the other.

        Of weights that the model has in files, the main process, which saves them, writes the new values into another.
        """
        frozen = {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}
        own = model.state_dict(keep_vars=True)
        for name, tensor in self._tensors().items():
            if name in frozen:
                continue
            full = whole(tensor)
            if not own[name].is_meta:
                own[name].copy_(full)
            elif self.accelerator.is_main_process:
                put(model, name, full.cpu())
        tie(model)

    def save(self, folder: Path) -> None:
        """Write the weights, file by file: the main process gathers one after the other until a file is full."""
        if self.accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
        save_gathered(self._tensors(), folder / "model.safetensors")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read the weights that `save` wrote; the main process reads the files, and every process gets its part.

        Raises:
            RuntimeError: if the files' weights are not the model's.
            OSError, SafetensorError: if they cannot be read.
        """
        self._read(self._tensors(), folder, "model*.safetensors")

    def _read(self, own: Mapping[str, Tensor], folder: Path, pattern: str) -> None:
        """Fill tensors from the files that `save_gathered` wrote."""
        places: dict[str, Path] = {}
        if self.accelerator.is_main_process:
            if not (files := sorted(folder.glob(pattern))):
                raise FileNotFoundError(folder / pattern)
            sizes: dict[str, tuple[int, ...]] = {}
            for file in files:
                source = safe_open(file, "pt")
                sizes |= {name: tuple(source.get_slice(name).get_shape()) for name in source.keys()}  # noqa: SIM118
                places |= dict.fromkeys(source.keys(), file)
            if sizes != {name: tuple(tensor.shape) for name, tensor in own.items()}:
                raise RuntimeError("other names or sizes of weights")
        for name, tensor in own.items():
            # A file that stays open keeps what was read from it in memory.
            full = (
                safe_open(places[name], "pt").get_tensor(name)
                if places
                else torch.empty(tensor.shape, dtype=tensor.dtype)
            )
            full = full.to(self.accelerator.device)
            if isinstance(tensor, DTensor):
                tensor.copy_(distribute_tensor(full, tensor.device_mesh, tensor.placements))
            else:
                tensor.copy_(broadcast(full))

    def save_moments(self, optimizer: Optimizer | None, schedule: LRScheduler | None, folder: Path) -> None:
        """Write the states of the optimizer, its moments file by file as in `save`, and of its schedule."""
        assert optimizer is not None and schedule is not None
        state = get_optimizer_state_dict(self.model, optimizer)
        save_gathered(_moments(state), folder / "optimizer.safetensors")
        if self.accelerator.is_main_process:
            torch.save({"param_groups": state["param_groups"]}, folder / MOMENTS)
            torch.save(schedule.state_dict(), folder / RATES)

    def load_moments(self, optimizer: Optimizer | None, schedule: LRScheduler | None, folder: Path) -> None:
        """Read what `save_moments` wrote; the main process reads the moments, and every process gets its part.

        Raises:
            RuntimeError: if the moments are not those of the model's weights.
            OSError, SafetensorError: if they cannot be read.
        """
        assert optimizer is not None and schedule is not None
        load = partial(torch.load, map_location="cpu", weights_only=True)
        if any(folder.glob("optimizer*.safetensors")):
            state = get_optimizer_state_dict(self.model, optimizer)
            self._read(_moments(state), folder, "optimizer*.safetensors")
            set_optimizer_state_dict(self.model, optimizer, {**state, **load(folder / MOMENTS)})
        else:
            # As earlier versions wrote it: all in one file.
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            state = load(folder / MOMENTS) if self.accelerator.is_main_process else {}
            set_optimizer_state_dict(self.model, optimizer, state, options=options)
        schedule.load_state_dict(load(folder / RATES))


def _moments(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state by name."""
    return {f"{name}/{key}": tensor for name, one in state["state"].items() for key, tensor in one.items()}


def make_accelerator(model: PreTrainedModel) -> Accelerator:
    """Make an Accelerate object for a model's device."""
    device = device_of(model).type
    # Accelerate has one state per process, with the device and the precision of its first object. A later model may be
    # on another device, and a tuning before it may have run in half precision.
    if AcceleratorState._shared_state:
        state, precision = AcceleratorState(), os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        moved = not several() and state.device.type != device
        if moved or (state.mixed_precision in ("bf16", "fp16") and state.mixed_precision != precision):
            AcceleratorState._reset_state(reset_partial_state=not several())
    # For several processes, accelerate's own configuration assigns the devices.
    if several():
        accelerator = Accelerator()
        if under_fsdp() and accelerator.distributed_type != DistributedType.FSDP:
            start_fsdp(accelerator)
        return accelerator
    return Accelerator(cpu=device == "cpu" and not AcceleratorState._shared_state)
