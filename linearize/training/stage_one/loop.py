"""Stage one: train the kernels of a converted model to imitate its frozen softmax attention.

Only the kernels are trained. Each layer's loss needs only that layer's q, k and v under the frozen model, so its
gradient is computed inside the frozen forward pass, as soon as the layer has run (`stage_one.observer`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, send_to_device
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions
from linearize.checkpoint.loading import Loaded, move
from linearize.conversion.positions import text_length
from linearize.core.errors import ConfigError, DataError, some
from linearize.core.signatures import known_names
from linearize.data import DataConfig, Source, load_source
from linearize.fidelity.measure import Fidelity, measure_layers
from linearize.fidelity.teacher import body_of, chain_of
from linearize.modeling.model import kernel_parameters
from linearize.modeling.plan import Plan
from linearize.modeling.weights import device_of, is_streamed
from linearize.training.alignment.pair import find_blocks
from linearize.training.processes import check_fsdp
from linearize.training.run import Batches, Progress, Report, Run, check_inputs, fade_beyond, frozen
from linearize.training.sharding import empty_copy, fill, make_accelerator
from linearize.training.stage_one.config import DISTILL_LENGTH, DistillConfig
from linearize.training.stage_one.observer import KernelTrainer, LayerLoss, kernels_of, layer_loss
from linearize.training.stage_one.quantized import quantized_copy
from linearize.training.stage_one.start import start_scales
from linearize.training.stage_one.streamed import BlockRecord, check_streamed, load_kernel, mean_held_out, train_blocks
from linearize.training.states import RunState, StateFolder, of_size


@dataclass(frozen=True)
class StepReport(Report):
    """The report of a step: `losses` are means per layer, by host module, and `held_out` is their mean over layers.

    Attributes:
        stage: "stage one".
        phase: empty.
    """

    stage: ClassVar[str] = "stage one"
    phase: ClassVar[str] = ""

    @property
    def loss(self) -> float:
        """Mean loss over the layers."""
        return sum(self.losses.values()) / max(1, len(self.losses))


@dataclass
class DistillResult:
    """The result of stage one.

    Attributes:
        steps: optimizer steps done.
        best_step: the step whose parameters were kept.
        held_out: mean held-out loss at that step.
        stopped: why it ended ("steps", "early stopping", "nothing to learn").
        before: fidelity before stage one, on the held-out batches.
        after: fidelity after it.
        history: one record per step.
        seconds: duration of the training itself.
        state: state from which a resumed run returns this result at once; None if nothing was trained, or if the data
            cannot be identified (it has no `digest`) and the run keeps no states.
    """

    steps: int
    best_step: int
    held_out: float | None
    stopped: str
    before: Fidelity
    after: Fidelity
    history: list[StepReport] = field(default_factory=list)
    seconds: float = 0.0
    state: RunState | None = None


@known_names(DistillConfig)
def distill(
    model: PreTrainedModel,
    data: Batches,
    config: DistillConfig | None = None,
    *,
    on_step: Callable[[StepReport], None] | None = None,
    accelerator: Accelerator | None = None,
) -> DistillResult:
    """Train the kernels of a converted model, in place.

    Args:
        model: a converted model.
        data: the source of batches, e.g. `linearize.data.load_source(...)`.
        config: options.
        on_step: called after every step (progress bars, logs).
        accelerator: an Accelerate object; None makes one.

    Returns:
        The result, with fidelity before and after on held-out batches.

    Raises:
        ConfigError: if the model is not converted, the data gives no batches, or an option does not fit a kernel or
            the run to be resumed.
        DataError: if the data never reaches a kernel that learns.
        TrainingError: if a loss becomes NaN or infinite; the message names layer and step. The model then keeps its
            best earlier parameters.
    """
    config = config or DistillConfig()
    check_inputs("stage one", model, data)
    return _Run(data, config, on_step, accelerator or make_accelerator(model)).run(model)


class _Run(Run):
    """One run of stage one. Its states call it group 0: earlier versions could train layers in groups."""

    part_name, weights_name, report = "group", "kernel", StepReport
    config: DistillConfig
    trainer: KernelTrainer

    def run(self, model: PreTrainedModel) -> DistillResult:
        """Measure, train, measure again."""
        named = linear_attentions(model).items()
        layers = [layer_loss(name, layer, self.config) for name, layer in named if layer.mixer.learnable]
        home = device_of(model)
        streamed = check_streamed(self.config) if is_streamed(model) else None
        self.identify(model)
        fade_beyond(model, self.data)
        passed = frozen_model(model, self.accelerator, self.config.quantize_frozen)
        held_out = self.data.holdout_batches()
        before = measure_layers(passed, held_out)
        # For example, texts without images never reach the image tower of CLIP.
        ran = {layer.module for layer in before.layers}
        if missed := [loss.name for loss in layers if loss.name not in ran]:
            plan = Plan.from_dict(model.config.linearize).converted
            numbers = [
                str(layer.index) for layer in plan if any(f".{name}".endswith(f".{layer.module}") for name in missed)
            ]
            raise DataError(
                f"stage one: the data never reaches {some(missed)}, so the kernels there would stay untrained; keep "
                f"them softmax (--keep-softmax {','.join(numbers)}), or call linearize.distill with batches that reach "
                "them"
            )
        if not layers or self.config.steps == 0:
            return DistillResult(0, 0, None, "steps" if layers else "nothing to learn", before, before)
        with frozen(model):
            # `frozen` does not cover a sharded copy, which is discarded afterwards.
            passed.eval().requires_grad_(False)
            if streamed is not None:
                self.stream(passed, layers, held_out, streamed)
            else:
                self.train_together(passed, layers, held_out)
        seconds = self.seconds if streamed is None else self.history[-1].seconds
        after = measure_layers(passed, held_out)
        if passed is not model:
            # The kernels were on the accelerator: move them back to the device of the rest of the given model.
            for layer in linear_attentions(model).values():
                layer.to(home)
        steps, done = len(self.history), self.progress
        return DistillResult(
            steps, done.best_step, done.best_loss, done.stopped, before, after, self.history, seconds, self.state
        )

    def train_together(
        self, model: PreTrainedModel, layers: list[LayerLoss], held_out: list[dict[str, Tensor]]
    ) -> None:
        """Train all kernels in each pass of the model."""
        saved = self.load(kernels_of(layers))
        for loss in layers:
            loss.layer.train().requires_grad_(True)
        trainer, start = KernelTrainer(model, layers, self.config, self.accelerator), math.inf
        if saved is None:
            start_scales(trainer, self.train_batches(), held_out)
            start = trainer.evaluate(held_out)
        self.begin(0, 0, self.config.steps, trainer, saved, start)
        self.train(held_out)

    def stream(
        self,
        model: PreTrainedModel,
        layers: list[LayerLoss],
        held_out: list[dict[str, Tensor]],
        states: StateFolder,
    ) -> None:
        """Train block after block, then choose the best step of all (`stage_one.streamed`)."""
        config, names = self.config, [loss.name for loss in layers]
        if self.accelerator.is_main_process and not config.resume:
            states.check_free(overwrite=False)
        for loss in layers:
            loss.layer.train().requires_grad_(True)

        def on_step(name: str, step: int, record: BlockRecord) -> None:
            done, many = names.index(name) * config.steps + step, len(layers) * config.steps
            losses, loss = {name: record.losses[-1]}, record.held_out.get(step)
            if self.on_step is not None:
                tokens = record.tokens[-1] * done // step
                self.on_step(StepReport(done, many, losses, loss, record.rates[-1], self.seconds, tokens=tokens))

        chain = chain_of(model, send_to_device(held_out[0], self.accelerator.device))
        assert chain is not None
        self.start = time.perf_counter()
        trained = train_blocks(
            chain, layers, self.train_batches, held_out, config, self.accelerator, states, self.identity, on_step
        )
        records = [record for _, record, _ in trained]
        self.steps, self.progress = config.steps, Progress(best_loss=mean_held_out(records, 0))
        while self.progress.step < self.steps and not self.progress.stopped:
            step = self.progress.step + 1
            losses = {loss.name: record.losses[step - 1] for loss, record, _ in trained}
            mean = mean_held_out(records, step) if step in records[0].held_out else None
            self.note_step(mean)
            seconds = sum(record.seconds[step - 1] for record in records)
            rate, tokens = records[0].rates[step - 1], records[0].tokens[step - 1]
            self.history.append(StepReport(step, self.steps, losses, mean, rate, seconds, tokens=tokens))
        self.progress.stopped = self.progress.stopped or "steps"
        for loss, _, folder in trained:
            kernel = load_kernel(folder, self.progress.best_step)
            for name, tensor in kernels_of([loss]).items():
                tensor.data.copy_(of_size(kernel[name], tensor))

    def note_step(self, loss: float | None) -> bool:
        """Count a step with its held-out loss, or None; tell whether it is the best so far."""
        config, progress = self.config, self.progress
        progress.step += 1
        if loss is not None and progress.better(loss):
            return True
        if config.patience and progress.rises >= config.patience:
            progress.stopped = "early stopping"
        return False

    def step(self, batches: Iterator[dict[str, Tensor]], held_out: list[dict[str, Tensor]]) -> None:
        config, trainer, step = self.config, self.trainer, self.progress.step + 1
        rate = trainer.step(batches, step)
        losses = {layer.name: layer.mean for layer in trainer.layers}
        evaluates = step % config.eval_every == 0 or step == self.steps
        loss = trainer.evaluate(held_out, step) if evaluates else None
        if self.note_step(loss):
            self.best_weights = trainer.snapshot()
        self.finish_step(StepReport(step, self.steps, losses, loss, rate, self.seconds))

    def options(self) -> dict[str, object]:
        named = super().options() | {"data": getattr(self.data, "description", None)}
        # Runs of earlier versions do not record it.
        return {name: value for name, value in named.items() if name != "quantize_frozen" or value is not None}


def within(loaded: Loaded, length: int = DISTILL_LENGTH) -> int:
    """Return the tokens per row: `length`, or the model's current limit if that is smaller."""
    most = text_length(loaded.model) if loaded.modality == "text" else None
    return min(length, most or length)


def batches_for(loaded: Loaded, data: DataConfig, length: int | None, skip: str) -> Source:
    """Open a data set for a model.

    Args:
        loaded: model, processor, modality and name from `linearize.checkpoint.loading`.
        data: the data; its `max_length` is replaced.
        length: tokens per row, at most the model's limit; None for `DISTILL_LENGTH`.
        skip: the option that avoids reading data, for error messages.

    Raises:
        ConfigError: if the model reads neither text nor images, or has no tokenizer or image processor.
        DataError: if the data cannot be found, read or used.
    """
    if loaded.modality == "other":
        raise ConfigError(
            f"stage one supports text and images, but {type(loaded.model).__name__} takes "
            f"{loaded.model.main_input_name}; pass {skip}, or call linearize.distill with your own batches"
        )
    if loaded.processor is None:
        kind = "tokenizer" if loaded.modality == "text" else "image processor"
        raise ConfigError(
            f"{loaded.name!r} has no {kind}, which stage one needs; add one to the folder, or pass {skip}"
        )
    tokens = within(loaded, length or DISTILL_LENGTH)
    return load_source(dataclasses.replace(data, max_length=tokens), loaded.processor, loaded.modality)


def frozen_model(model: PreTrainedModel, accelerator: Accelerator, quantized: str | None = None) -> PreTrainedModel:
    """Return the model for the passes of stage one: `model` on the accelerator's device, or a copy.

    The copy is quantised, if `quantized` says how, or sharded.

    Kernels are small: every process has all of them, and their gradients are added up after each step, as without FSDP.
    The frozen model may be too large for one device. Under FSDP it is copied; the copy's body is sharded over the
    devices and gathered one block at a time while it runs, and each process reads only its part of each weight
    (`linearize.training.sharding`). The copy shares its kernels with `model`, which stays where it is and is saved as
    usual.

    Raises:
        ConfigError: for the first version of FSDP, which cannot exclude the kernels.
    """
    if quantized is not None:
        return quantized_copy(model, quantized, accelerator.device)
    if accelerator.distributed_type != DistributedType.FSDP:
        move(model, accelerator.device)
        return model
    plugin = accelerator.state.fsdp_plugin
    check_fsdp("stage one", plugin.fsdp_version)
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    copied = empty_copy(model, accelerator.device)
    body = body_of(copied)
    for module in (*map(body.get_submodule, find_blocks(body)), body):
        fully_shard(
            module,
            # There is no backward pass to gather weights for.
            reshard_after_forward=True,
            mesh=getattr(accelerator, "torch_device_mesh", None),
            mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
            offload_policy=plugin.cpu_offload,
            ignored_params=set(kernel_parameters(copied)),
        )
    on_host = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    fill(copied, model, torch.device("cpu") if on_host else accelerator.device, body)
    return copied
