"""Stage two on transformers' Trainer: its checkpoints, its resume, its logs."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.adapters import adapter_files, add_lora, merge_lora
from linearize.attention.interface import linear_attentions
from linearize.checkpoint.output import is_write_error
from linearize.distillation.processes import own_device, under_fsdp
from linearize.distillation.run import Interrupts
from linearize.errors import CheckpointError
from linearize.finetune.checkpoints import check_names, finished, last_checkpoint
from linearize.finetune.checks import check_adapter, check_fsdp, check_trains, checkpointing
from linearize.finetune.config import TuneConfig
from linearize.finetune.dropout import dropping
from linearize.finetune.interval import Measured, balanced_score, score_of
from linearize.finetune.prepared import Predictions, TaskData
from linearize.finetune.report_to import callbacks
from linearize.finetune.selection import hold_out
from linearize.finetune.tasks import main_metric
from linearize.finetune.teacher import check_teacher, freeze
from linearize.finetune.watch import TuneStep, start_keeper, state_keeper, step_reporter, watch
from linearize.finetune.work import begin, check_started, describe
from linearize.loading import quiet

if TYPE_CHECKING:
    from torch import nn
    from transformers import EvalPrediction, PreTrainedModel, TrainerCallback, TrainingArguments

    from linearize.finetune.tuner import Tuner


@dataclass
class TuneResult:
    """What stage two did.

    Attributes:
        metrics: the task's metrics of the model that was kept, on the validation rows.
        score: the task's one figure.
        steps: optimizer steps done.
        best_step: the step whose weights were kept; 0 where none measured better than those it began with.
        selection: what that step was chosen by: `by` (figure), `on` (rows), `rows` (their number), `value`.
        stopped: "steps" or "early stopping".
        history: the trainer's log.
        seconds: duration; after a resume, of the last part only.
        interval: 95 % bootstrap interval of the score; None if rows cannot be drawn.
        chance: the score of the best answer that looks at no input; None if undefined.
        adapter: files of the low-rank updates as peft has them, by name; None where they were not asked for.
    """

    metrics: dict[str, float]
    score: float
    steps: int
    best_step: int
    stopped: str
    history: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    selection: dict[str, object] = field(default_factory=dict)
    interval: tuple[float, float] | None = None
    chance: float | None = None
    adapter: dict[str, bytes] | None = None


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

    Those that it began with are among them, so that by these rows it never ends worse than it began.

    With a teacher the loss is the squared error of every layer's hidden states and the divergence from the teacher's
    logits; the labels join later (CALD, ICLR 2025, arXiv 2410.06846; TinyBERT, arXiv 1909.10351). The kept state is
    then the one nearest to the teacher's logits, else the one with the smallest loss, on the held-out rows.

    Args:
        model: softmax or converted, with the task's head.
        data: rows to train on and to measure on.
        config: options.
        folder: for the trainer's checkpoints.
        resume: whether to go on from the last whole checkpoint in that folder, if there is one.
        on_log: called with every entry of the log.
        tensorboard: folder for TensorBoard's files, if the options ask for them; by default `<folder>.tensorboard`.
        teacher: the softmax model tuned for the task, of the same architecture and size; it is frozen. None: labels
            alone.
        on_step: called after every step (progress bars).
        adapter_of: name of the model, where its low-rank updates are wanted by themselves too; None: merged alone.

    Returns:
        What was done.

    Raises:
        ConfigError: if the teacher cannot be compared with the model, the model knows no gradient checkpointing, or
            several processes were started with the first version of FSDP.
        DataError: if there are too few rows to hold some out.
        TrainingError: if the loss becomes NaN or infinite.
        CheckpointError: if the folder cannot be used, or its checkpoint does not fit the model.
        ConfigError: if the run to be resumed was started with another model, other data or other options.
    """
    config = config or TuneConfig()
    start = time.perf_counter()
    check_adapter(config, adapter_of)
    check_fsdp()
    check_trains(data)
    data = hold_out(data, config.selection_rows, seed=config.seed)
    if teacher is not None:
        check_teacher(teacher, model)
        teacher = freeze(teacher, model)
    started = describe(model, data, config, teacher)
    predicted, keep = keeping(data.compute_metrics)
    # Low-rank updates begin with random numbers; a resumed run must draw the same ones.
    _seed(config.seed)
    set_trained(model, config)
    last = last_checkpoint(folder) if resume else None
    if last is not None:
        check_names(model, last)
        check_started(Path(folder), started)
    # Under FSDP a copy is spread over the processes, and what it learned comes back.
    trained = copy.deepcopy(model) if under_fsdp() else model
    kept = replace(data, compute_metrics=keep)
    trainer = make_trainer(trained, kept, config, folder, on_log, teacher, sharded=trained is not model)
    if on_step is not None:
        trainer.add_callback(step_reporter(trainer, on_step))
    interrupts = Interrupts()
    reporting = callbacks(config.report_to, tensorboard or f"{folder}.tensorboard")
    for callback in (*reporting, start_keeper(trainer), state_keeper(interrupts, config.save_every)):
        trainer.add_callback(callback)
    share = config.dropout
    if share is None and teacher is not None and not config.final_labels_weight:
        # Imitation has nothing to learn by heart, and its noise takes a model away from its teacher.
        share = 0.0
    with interrupts, checkpointing(trained, config.gradient_checkpointing), dropping(trained, share):
        _train(trainer, Path(folder), last, started)
    history = list(trainer.state.log_history)
    metrics = _measured(trainer)
    found = score_of(data, metrics, *predicted[-1])
    trainer.gather_into(model)
    adapter = _end_training(model, config, adapter_of)
    state = trainer.state
    best = int(str(state.best_model_checkpoint or f"-{state.global_step}").rpartition("-")[2])
    stopped = "early stopping" if state.global_step < state.max_steps else "steps"
    seconds = time.perf_counter() - start
    chosen = selection_record(data, config, teacher is not None, state.best_metric)
    steps = state.global_step
    return TuneResult(
        metrics, found.score, steps, best, stopped, history, seconds, chosen, found.interval, found.chance, adapter
    )


def set_trained(model: PreTrainedModel, config: TuneConfig) -> None:
    """Choose what is trained: low-rank updates with kernels and head, or everything; never frozen kernels."""
    if config.lora is not None:
        add_lora(model, config.lora)
    if config.freeze_kernels:
        for layer in linear_attentions(model).values():
            layer.requires_grad_(False)


def _end_training(model: PreTrainedModel, config: TuneConfig, adapter_of: str | None) -> dict[str, bytes] | None:
    """Undo `set_trained`: low-rank updates become part of the weights; where asked for, return their files too."""
    adapter = None
    if config.lora is not None:
        adapter = None if adapter_of is None else adapter_files(model, config.lora, adapter_of)
        merge_lora(model)
    elif config.freeze_kernels:
        model.requires_grad_(True)
    model.eval()
    return adapter


def _train(trainer: Tuner, folder: Path, last: Path | None, started: dict[str, object]) -> None:
    try:
        if last is None and trainer.is_world_process_zero():
            begin(folder, started)
        with quiet():
            if last is not None and finished(last):
                # transformers would take one step more.
                trainer.restore(last)
                return
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
    except Exception as error:
        if not is_write_error(error):
            raise
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"stage two: {str(folder)!r} cannot be written ({reason}); make room, then --resume"
        ) from error


def measure_task(
    model: PreTrainedModel, data: TaskData, *, batch_size: int = 64, precision: str = "no"
) -> dict[str, float]:
    """Measure a model on a task's validation rows and return the metrics."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        config = TuneConfig(batch_size=batch_size, eval_batch_size=batch_size, precision=precision)
        measured = model if data.wrap is None else data.wrap(model)
        return _measured(make_trainer(measured, data, config, folder, None))


def measure_with_interval(model: PreTrainedModel, data: TaskData, *, batch_size: int = 64) -> Measured:
    """Measure a model on a task's validation rows, with an interval and the chance level.

    Args:
        model: the model, on its device.
        data: the task's rows.
        batch_size: rows per batch.
    """
    kept, keep = keeping(data.compute_metrics)
    metrics = measure_task(model, replace(data, compute_metrics=keep), batch_size=batch_size)
    predictions, labels = kept[-1]
    return Measured(
        **vars(score_of(data, metrics, predictions, labels)),
        metrics=metrics,
        rows=len(data.validation),
        by_position=() if data.by_position is None else data.by_position(predictions),
        balanced=balanced_score(data, metrics, predictions, labels),
    )


Compute = Callable[[Predictions, Predictions], dict[str, float]]


def keeping(compute: Compute) -> tuple[deque[tuple[Predictions, Predictions]], Compute]:
    """Return a function that computes metrics as `compute` does, and the place where the last predictions are kept."""
    kept: deque[tuple[Predictions, Predictions]] = deque(maxlen=1)

    def keep(predictions: Predictions, labels: Predictions) -> dict[str, float]:
        kept.append((predictions, labels))
        return compute(predictions, labels)

    return kept, keep


def selection_record(data: TaskData, config: TuneConfig, taught: bool, value: float | None) -> dict[str, object]:
    """Say what the kept state was chosen by, as plain data."""
    if data.selection is None:
        by, on, rows = f"score ({', '.join(data.task.score)})", "validation rows", len(data.validation)
    else:
        by, on, rows = "loss", "rows held out of the training rows", len(data.selection)
        if taught:
            by = "squared error to the teacher" if data.task.kind == "regression" else "divergence from the teacher"
            by += " and loss on the labels" if config.final_labels_weight else ""
    return {"by": by, "on": on, "rows": rows, "value": value}


def make_trainer(
    model: nn.Module,
    data: TaskData,
    config: TuneConfig,
    folder: str | Path,
    on_log: Callable[[dict[str, float]], None] | None,
    teacher: PreTrainedModel | None = None,
    *,
    sharded: bool = False,
) -> Tuner:
    """Build transformers' trainer for a task; rows without a label are learned from where there is a teacher.

    With `sharded` the model will be spread over the processes of an FSDP run, and the teacher is at once.
    """
    from torch.utils.data import ConcatDataset
    from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback

    from linearize.finetune.loss_meter import LossMeter
    from linearize.finetune.tuner import Tuner

    made: type[Tuner] = Tuner
    if sharded:
        from linearize.finetune.sharded import ShardedTuner as made

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        metrics = data.compute_metrics(prediction.predictions, prediction.label_ids)
        return metrics | {"score": main_metric(data.task, metrics)}

    callbacks: list[TrainerCallback] = [watch(on_log), LossMeter()]
    if config.patience:
        callbacks.append(EarlyStoppingCallback(config.patience))
    extra = data.extra if teacher is not None else None
    trainer = made(
        kind=data.task.kind,
        config=config,
        teacher=teacher,
        selection=data.selection,
        model=model,
        args=training_arguments(model, data, config, folder, device=own_device("auto") if sharded else None),
        train_dataset=ConcatDataset([data.train, extra]) if extra else data.train,
        eval_dataset=data.validation,
        data_collator=data.collate,
        compute_metrics=compute,
        preprocess_logits_for_metrics=data.reduce,
        callbacks=callbacks,
    )
    for printing in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printing)
    return trainer


def training_arguments(
    model: nn.Module, data: TaskData, config: TuneConfig, folder: str | Path, *, device: str | None = None
) -> TrainingArguments:
    """Translate the options for transformers; a model trains where it is, if no device is given."""
    from transformers import TrainingArguments

    held_out = data.selection is not None
    on_cpu = (device or next(model.parameters()).device.type) == "cpu"
    when = "steps" if config.eval_every else "epoch"
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.eval_batch_size or 2 * config.batch_size,
        num_train_epochs=config.epochs,
        max_steps=config.steps or -1,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        warmup_steps=config.warmup,
        lr_scheduler_type=config.schedule,
        max_grad_norm=config.max_grad_norm,
        gradient_accumulation_steps=config.gradient_accumulation,
        train_sampling_strategy="group_by_length" if config.group_by_length else "random",
        bf16=config.precision == "bf16",
        fp16=config.precision == "fp16",
        eval_strategy=when,
        save_strategy=when,
        eval_steps=config.eval_every,
        save_steps=config.eval_every or 500,
        # The best and the last: should the result not be writable, a resume from the last saves it at once.
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="selection" if held_out else "score",
        greater_is_better=not held_out and not data.task.lower_is_better,
        restore_callback_states_from_checkpoint=True,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        # Added by `finetune` itself, as measuring alone reports to nobody.
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        remove_unused_columns=False,
        label_names=list(data.task.type.label_fields),
        seed=config.seed,
        data_seed=config.seed,
    )


def _measured(trainer: Tuner) -> dict[str, float]:
    with quiet():
        found = trainer.evaluate()
    skipped = {"loss", "score", "selection", "runtime", "samples_per_second", "steps_per_second"}
    skipped.add("model_preparation_time")
    named = {name.removeprefix("eval_"): value for name, value in found.items() if name.startswith("eval_")}
    return {name: float(value) for name, value in named.items() if name not in skipped}


def _seed(seed: int) -> None:
    from transformers import set_seed

    set_seed(seed)
