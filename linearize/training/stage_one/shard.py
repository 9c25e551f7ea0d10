"""The frozen model of stage one, whole or spread over the processes of an FSDP run.

Kernels are small: every process has all of them, and their gradients are added up after each step, as without FSDP.
The frozen model may be too large. Under FSDP it is copied; the copy's body is spread over the devices and gathered one
block at a time while it runs. The copy shares its kernels with the given model, which stays whole in host memory and is
saved as usual.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions
from linearize.checkpoint.loading import move
from linearize.core.errors import ConfigError
from linearize.fidelity.teacher.observe import body_of


def frozen_model(model: PreTrainedModel, accelerator: Accelerator) -> PreTrainedModel:
    """Return the model for the passes of stage one: `model` on the accelerator's device, or its spread-out copy.

    Raises:
        ConfigError: for the first version of FSDP, which cannot exclude the kernels.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        move(model, accelerator.device)
        return model
    plugin: Any = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ConfigError(
            f"stage one: got FSDP version {plugin.fsdp_version}, expected 2; set fsdp_version: 2 under fsdp_config in "
            "the file of accelerate config"
        )
    kernels = list(linear_attentions(model).values())
    for kernel in kernels:
        kernel.to(accelerator.device)
    spread: PreTrainedModel = copy.deepcopy(model, {id(kernel): kernel for kernel in kernels})
    body = body_of(spread)
    whole = (parameter for kernel in kernels for parameter in kernel.parameters())
    shard_frozen(body, blocks_of(body), accelerator, whole=whole)
    return spread


def shard_frozen(
    body: nn.Module, blocks: Iterable[nn.Module], accelerator: Accelerator, *, whole: Iterable[nn.Parameter] = ()
) -> None:
    """Spread the weights of a module that has no backward pass over the processes, in place.

    Args:
        body: the module.
        blocks: its layers, each gathered separately while it runs.
        accelerator: of an FSDP 2 run.
        whole: weights that every process keeps.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plugin = accelerator.state.fsdp_plugin
    shard = functools.partial(
        fully_shard,
        # There is no backward pass to gather weights for.
        reshard_after_forward=True,
        mesh=getattr(accelerator, "torch_device_mesh", None),
        mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        offload_policy=plugin.cpu_offload,
        ignored_params=set(whole),
    )
    for block in blocks:
        shard(block)
    shard(body)


def blocks_of(body: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that hold converted attentions: the outermost members of lists of modules."""
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    for module in body.modules():
        if not isinstance(module, nn.ModuleList):
            continue
        for block in module:
            if id(block) not in inside and linear_attentions(block):
                blocks.append(block)
            inside.update(id(part) for part in block.modules())
    return blocks
