"""Stage two under FSDP 2: weights, gradients and the optimizer's state are spread over the processes.

The caller's model stays whole in the host's memory. A copy is spread over the devices and trained; its blocks, with
their kernels, are gathered one at a time while they run. At the end the tuned weights are copied back. One process
gathers and writes the trainer's checkpoints, in the same form as a run of a single process.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
)
from accelerate.utils.operations import convert_outputs_to_fp32
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from transformers.utils import SAFE_WEIGHTS_NAME, ModelOutput

from linearize.training.stage_one.loop import blocks_of, shard_frozen
from linearize.training.stage_two.tuner import Tuner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""Whole tensors, in the memory of the first process; the others get none."""
HANDED_OUT = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
"""The first process has whole tensors, and sends every process its part."""
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"


class ShardedTuner(Tuner):
    """The trainer of stage two for a model that is spread over the processes.

    Args:
        *arguments: of `Tuner`; the model is spread out when training begins.
        **options: of `Tuner`; the teacher is spread out at once.
    """

    model: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        state = self.accelerator.state
        if state.distributed_type == DistributedType.MULTI_CPU:
            # accelerate starts FSDP on accelerators only; torch shards on a CPU as well.
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, FullyShardedDataParallelPlugin()
            self.is_fsdp_enabled = True
        model, plugin = self.model, state.fsdp_plugin
        blocks = _blocks(model)
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
        plugin.transformer_cls_names_to_wrap = sorted({type(block).__name__ for block in blocks.values()})
        # Weights stay fp32, kernels above all; other precisions come from autocast, as in one process.
        plugin.mixed_precision_policy = MixedPrecisionPolicy()
        if self.accelerator.native_amp:
            model.forward = convert_outputs_to_fp32(self.accelerator.autocast()(model.forward))
        if self.teacher is not None:
            self.teacher = copy.deepcopy(self.teacher)
            shard_frozen(self.teacher, map(self.teacher.get_submodule, blocks), self.accelerator)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, ModelOutput]:
        """Return the loss of a batch in the precision of the run."""
        with self.accelerator.autocast():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def restore(self, checkpoint: Path) -> None:
        """Spread the model out, which no training has done, and load the kept weights of a run that had ended."""
        self.create_optimizer()
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.model_wrapped = self.model
        super().restore(checkpoint)

    def gather_into(self, model: PreTrainedModel) -> None:
        """Copy the tuned weights into the caller's model, in every process."""
        target = model.state_dict()
        with torch.no_grad():
            for name, value in get_model_state_dict(self.model).items():
                target[name].copy_(value.full_tensor() if isinstance(value, DTensor) else value)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write whole weights, as a single process does, under the modules' names."""
        state = get_model_state_dict(self.model, options=GATHERED)
        if self.args.should_save:
            folder = Path(output_dir or str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            # Tied weights may share their memory, which a file cannot.
            plain = {name: value.clone().contiguous() for name, value in state.items() if isinstance(value, Tensor)}
            save_file(plain, folder / SAFE_WEIGHTS_NAME, {"format": "pt"})

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = get_optimizer_state_dict(self.model, self._optimizer(), options=GATHERED)
        if self.args.should_save:
            assert self.lr_scheduler is not None
            torch.save(state, Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.lr_scheduler is not None
        state = (
            torch.load(Path(checkpoint) / OPTIMIZER, map_location="cpu", weights_only=True)
            if self.accelerator.is_main_process
            else {}
        )
        set_optimizer_state_dict(self.model, self._optimizer(), state, options=HANDED_OUT)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        self._load(self.best_folder())

    def _load(self, folder: Path) -> None:
        state = load_file(folder / SAFE_WEIGHTS_NAME) if self.accelerator.is_main_process else {}
        set_model_state_dict(self.model, {**state}, options=HANDED_OUT)

    def _optimizer(self) -> Any:
        """Return torch's optimizer, which accelerate has wrapped."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that are gathered one at a time, by name; transformers lists those of an unconverted model."""
    known = {id(block) for block in blocks_of(model)}
    kinds = () if known else getattr(model, "_no_split_modules", None) or ()
    return {name: m for name, m in model.named_modules() if id(m) in known or type(m).__name__ in kinds}
