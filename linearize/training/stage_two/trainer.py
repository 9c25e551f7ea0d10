"""Stage two: tune a model on a task with transformers' Trainer, or measure it.

The second part has the checks before a tuning, and the switches in a model during it (trained parts, dropout,
checkpointing).
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from linearize.attention.interface import linear_attentions
from linearize.checkpoint.loading import quiet
from linearize.checkpoint.output import is_write_error
from linearize.core.errors import CheckpointError, ConfigError, LinearizeError
from linearize.core.registry import Values
from linearize.modeling.weights import check_merged, is_offloaded
from linearize.training.adapters import adapter_files, add_lora, merge_lora, plain_name
from linearize.training.alignment.pair import check_teacher, share
from linearize.training.precision import HALF, end_autocast, in_fp32, passes_of, unchanged
from linearize.training.processes import check_launcher, is_main, under_fsdp
from linearize.training.run import fade_beyond
from linearize.training.sharding import check_settings, check_tied
from linearize.training.stage_two.config import TuneConfig
from linearize.training.stage_two.hooks import Hooks
from linearize.training.stage_two.intervals import Measured, measured
from linearize.training.stage_two.load import SEVERAL, freeze
from linearize.training.stage_two.prepare import hold_out
from linearize.training.stage_two.progress import TuneStep
from linearize.training.stage_two.save import TuneResult, describe, finished, resumed_from, write_started
from linearize.training.stage_two.task_types.base import ClassLabels, TaskData
from linearize.training.stage_two.tuner import Tuner
from linearize.training.states import unreadable_state
from linearize.training.trackers import callbacks_for


def finetune(
    model: PreTrainedModel,
    data: TaskData,
    config: TuneConfig | None = None,
    *,
    folder: str | Path,
    resume: bool = False,
    on_log: Callable[[dict[str, float]], None] | None = None,
    tensorboard: str | Path | None = None,
    teacher: PreTrainedModel | None = None,
    on_step: Callable[[TuneStep], None] | None = None,
    adapter_of: str | None = None,
) -> TuneResult:
    """Tune a model on a task, in place; it ends with the weights that measured best on rows held out of training.

    The weights before the first step are one of the choices, so on these rows the model never gets worse.

    With a teacher the loss is the squared error of every layer's hidden states and the divergence from the teacher's
    logits; the labels join later (CALD, ICLR 2025, arXiv 2410.06846; TinyBERT, arXiv 1909.10351). The kept weights
    are those nearest to the teacher's logits on the held-out rows; without a teacher, those with the smallest loss.

    Args:
        model: a softmax or converted model with the task's head.
        data: rows to train on and to measure on.
        config: options.
        folder: folder for the trainer's checkpoints.
        resume: whether to resume from the last complete checkpoint in that folder, if there is one.
        on_log: called with every entry of the log.
        tensorboard: folder for TensorBoard's files, if the options ask for them; by default `<folder>.tensorboard`.
        teacher: the softmax model tuned for the task, of the same architecture and size; it is frozen. Of its weights,
            those that equal ones of the model that are not trained (low-rank updates) become the same memory. None to
            learn from labels alone.
        on_step: called after every step (progress bars).
        adapter_of: name of the model, if its low-rank updates are also wanted as separate files; else None.

    Returns:
        The result.

    Raises:
        ConfigError: if the teacher cannot be compared with the model, the model does not support gradient
            checkpointing, FSDP 2 cannot shard it, or the run to be resumed was started with another model, other data
            or other options.
        DataError: if there are too few rows to hold some out.
        TrainingError: if the loss becomes NaN or infinite.
        CheckpointError: if the folder cannot be used, or its checkpoint does not fit the model.
    """
    config = config or TuneConfig()
    start = time.perf_counter()
    check_options(config, adapter_of)
    check_trainable(model, data, config)
    data = hold_out(data, config.selection_rows, seed=config.seed)
    if teacher is not None:
        check_teacher(model, teacher)
    # It stays, so it is set before the config that is restored is kept.
    fade_beyond(model, data)
    with unchanged(model, teacher):
        if teacher is not None:
            teacher = freeze(teacher, model)
        started = describe(model, data, config, teacher)
        last = resumed_from(Path(folder), started) if resume else None
        # Low-rank updates begin with random numbers; a resumed run must draw the same ones.
        set_seed(config.seed)
        passes = passes_of(model) if config.precision == "no" else config.precision
        half = any(parameter.dtype in HALF for parameter in model.parameters())
        set_trained(model, config)
        if teacher is not None and not under_fsdp():
            # Parameters of its own: the model's may be given another dtype.
            frozen = {name: x for name, x in model.named_parameters() if not x.requires_grad}
            share(teacher, {plain_name(name): nn.Parameter(x.detach(), False) for name, x in frozen.items()})
        # Under FSDP the trainer has copies of both models.
        with contextlib.nullcontext() if under_fsdp() else in_fp32(model, whole=passes == "no"):
            options = dataclasses.replace(config, precision=passes)
            trainer = Tuner(model, data, options, folder, teacher=teacher, on_log=on_log)
            trackers = callbacks_for(config.report_to, tensorboard or f"{folder}.tensorboard")
            for tracker in trackers:
                trainer.add_callback(tracker)
            _train(trainer, last, started, on_step)
            if trainer.shards:
                trainer.shards.gather_into(model)
        kept = _kept(trainer)
        # What is measured now are the kept weights, not those of the last step: trackers have their point already, and
        # TensorBoard takes an earlier step for a restart.
        for tracker in trackers:
            trainer.remove_callback(tracker)
        trainer.state.epoch *= kept["best_step"] / max(1, kept["steps"])
        trainer.state.global_step = kept["best_step"]
        adapter = end_training(model, config, adapter_of)
        if trainer.shards:
            trainer.end_sharding(model)
        if half and trainer.model is not None:
            # Measured as it is saved and used: rounded, and without autocast.
            end_autocast(trainer.model)
        found = measured(data, *trainer.measure())
    return TuneResult(**vars(found), **kept, adapter=adapter, seconds=time.perf_counter() - start)


def _train(
    trainer: Tuner, last: Path | None, started: dict[str, object], on_step: Callable[[TuneStep], None] | None
) -> None:
    """Train from the last checkpoint, if there is one, with the switches and states that the options ask for."""
    config, model, folder = trainer.tune, trainer.model, Path(str(trainer.args.output_dir))
    assert isinstance(model, PreTrainedModel)
    hooks = Hooks(trainer, on_step)
    trainer.add_callback(hooks)
    share = config.dropout
    if share is None and trainer.teacher is not None and not config.final_labels_weight:
        # A student that learns only from a teacher cannot overfit labels, and dropout moves it away from its teacher.
        share = 0.0
    with hooks.interrupts, checkpointing(model, config.gradient_checkpointing), dropping(model, share):
        try:
            if last is None and trainer.is_world_process_zero():
                write_started(folder, started)
            with quiet():
                if last is not None and finished(last):
                    # transformers would do one more step.
                    trainer.restore(last)
                else:
                    trainer.train(resume_from_checkpoint=None if last is None else str(last))
        except Exception as error:
            if "did not return a loss" in str(error):
                raise ConfigError(
                    f"stage two: {type(model).__name__} computes no loss on labels, expected a class that does; name "
                    "another one in the config.json of the checkpoint (architectures)"
                ) from error
            memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
            if last is not None and not hooks.began and not memory and not isinstance(error, LinearizeError):
                raise unreadable_state(last, error) from error
            if not is_write_error(error):
                raise
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"stage two: {str(folder)!r} cannot be written ({reason}); make room, then --resume"
            ) from error


def _kept(trainer: Tuner) -> Values:
    """Return which state of a run was kept, and how it was chosen, as fields of `TuneResult`."""
    data, state = trainer.data, trainer.state
    best_step = int(str(state.best_model_checkpoint or f"-{state.global_step}").rpartition("-")[2])
    losses = {entry["step"]: entry["eval_selection"] for entry in state.log_history if "eval_selection" in entry}
    if data.selection is None:
        by, on, rows = f"score ({', '.join(data.task.score)})", "validation rows", len(data.validation)
    else:
        loss = "loss at the best temperature" if isinstance(data.type, ClassLabels) else "loss"
        by, on, rows = loss, "rows held out of the training rows", len(data.selection)
        if trainer.teacher is not None:
            by = data.type.distance + (f" and {loss} on the labels" if trainer.tune.final_labels_weight else "")
    return {
        "steps": state.global_step,
        "best_step": best_step,
        "stopped": "early stopping" if state.global_step < state.max_steps else "steps",
        # Measuring adds to the log.
        "history": list(state.log_history),
        "selection": {"by": by, "on": on, "rows": rows, "value": losses.get(best_step, state.best_metric)},
    }


class Batches(TrainerCallback):
    """Counts the batches of a measurement; `on_batch` gets their number so far and in total."""

    def __init__(self, on_batch: Callable[[int, int], None]) -> None:
        self.done, self.on_batch = 0, on_batch

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Count a batch."""
        self.done += 1
        self.on_batch(self.done, len(given["eval_dataloader"]))


def measure_with_interval(
    model: PreTrainedModel,
    data: TaskData,
    *,
    batch_size: int = 64,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> Measured:
    """Measure a model on a task's validation rows, with an interval and the chance level.

    Args:
        model: the model, on its device.
        data: the task's rows.
        batch_size: rows per batch.
        on_batch: called after every batch with the number of batches so far and in total.
    """
    config = TuneConfig(batch_size=batch_size, eval_batch_size=batch_size)
    with unchanged(model), tempfile.TemporaryDirectory() as folder:
        tuner = Tuner(data.type.wrap(model), data, config, folder)
        tuner.add_callback(Batches(on_batch))
        return measured(data, *tuner.measure())


SHARE = re.compile(r"(.+_)?dropout(_p|_prob)?")
"""Attributes that attention modules pass to a function, as they have no dropout layer. Dropping whole layers
(`layerdrop`, `drop_path`) is something else."""


def check_options(config: TuneConfig, adapter_of: str | None) -> None:
    """Check what needs no model: a kept adapter needs low-rank updates, and the launcher's settings must be supported.

    Raises:
        ConfigError: if low-rank updates should be kept and the options have none, or for settings of FSDP that stage
            two does not support, or DeepSpeed.
    """
    if adapter_of is not None and config.lora is None:
        raise ConfigError("keep_adapter: got no low-rank updates to keep, expected some; give --lora r=8,alpha=16")
    check_launcher("stage two")
    if under_fsdp():
        check_settings("stage two", config.precision)


def check_trainable(model: PreTrainedModel, data: TaskData, config: TuneConfig) -> None:
    """Check that the task trains something, and that the model and the rows allow what the options ask for.

    Raises:
        ConfigError: if the task can only be measured, gradient checkpointing is wanted and not supported, or images
            should be grouped by length, or the model has an adapter of peft, or FSDP 2 cannot shard it, or it should
            be trained in fp16 on a CPU.
    """
    check_merged(model)
    if under_fsdp():
        check_tied(model)
    if config.precision == "fp16" and model.device.type == "cpu":
        # Accelerate would train in fp32 without a warning.
        raise ConfigError("precision: got fp16 on a CPU, which stage two cannot train in; expected bf16 or no")
    if not data.type.trains or data.type.options.chunks:
        raise ConfigError(
            f"stage two: task {data.task.name} has nothing to train; bring the model closer to its original with "
            "`linearize align`, and measure it with `linearize evaluate`"
        )
    problem = getattr(model.config, "problem_type", None)
    if data.task.several_kind is not None and problem is not None and data.type.several != (problem == SEVERAL):
        expected = SEVERAL if data.type.several else "single_label_classification"
        raise ConfigError(
            f"stage two: got a model with problem_type {problem!r} in its config, but rows with "
            f"{'several labels' if data.type.several else 'one label'} each, expected {expected!r}; load it with "
            "load_for_task"
        )
    if config.group_by_length and data.task.modality == "image":
        raise ConfigError("group_by_length: got images, which have no length, expected texts; leave it out")
    if config.gradient_checkpointing and not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"gradient_checkpointing: {type(model).__name__} does not support it; leave it out, and lower batch_size "
            "with more gradient_accumulation instead"
        )


@contextlib.contextmanager
def checkpointing(model: PreTrainedModel, wanted: bool) -> Iterator[None]:
    """Temporarily recompute each layer's activations for its gradients (Chen et al. 2016), if wanted."""
    if not wanted:
        yield
        return
    # transformers 5.17 only has the older name; later versions warn about it.
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": False})
    try:
        yield
    finally:
        getattr(model, f"{name}_checkpointing_disable")()
        model.disable_input_require_grads()


@contextlib.contextmanager
def dropping(model: nn.Module, share: float | None) -> Iterator[None]:
    """Temporarily set the dropout rate everywhere in a model; None leaves it unchanged."""
    before = [] if share is None else [(module, name, getattr(module, name)) for module, name in places(model)]
    for module, name, _ in before:
        setattr(module, name, share)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where a model keeps its dropout rates: modules, and the names of their attributes."""
    result: list[tuple[nn.Module, str]] = []
    for path, module in model.named_modules():
        # Dropout of low-rank updates has a separate option.
        if "lora_" in path:
            continue
        if isinstance(module, _DropoutNd):
            result.append((module, "p"))
        else:
            result += [(module, n) for n, v in vars(module).items() if isinstance(v, float) and SHARE.fullmatch(n)]
    return result


def set_trained(model: PreTrainedModel, config: TuneConfig) -> None:
    """Set what is trained: low-rank updates with kernels and head, or everything; never frozen kernels."""
    if config.lora is not None:
        add_lora(model, config.lora)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                # In fp32 until they are merged, as in peft, so that they are rounded only once.
                parameter.data = parameter.data.float()
    if config.freeze_kernels:
        for layer in linear_attentions(model).values():
            layer.requires_grad_(False)


def end_training(model: PreTrainedModel, config: TuneConfig, adapter_of: str | None) -> dict[str, bytes] | None:
    """Undo `set_trained`, merging low-rank updates; return their files if `adapter_of` names their model."""
    adapter = None
    if config.lora is not None:
        if adapter_of is not None and (is_main() or not is_offloaded(model)):
            adapter = adapter_files(model, config.lora, adapter_of)
        merge_lora(model)
    elif config.freeze_kernels:
        model.requires_grad_(True)
    model.eval()
    return adapter
