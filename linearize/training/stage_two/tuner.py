"""transformers' Trainer with the additions of stage two: a teacher, a learning rate for kernels, selection rows.

The loss with a teacher is CALD's (ICLR 2025, arXiv 2410.06846) and TinyBERT's (arXiv 1909.10351): the hidden states of
every layer and the logits; the labels join later.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import ConcatDataset, Dataset, Sampler
from transformers import EvalPrediction, PreTrainedModel, Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import EarlyStoppingCallback, PrinterCallback
from transformers.trainer_pt_utils import LengthGroupedSampler, find_batch_size
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput
from transformers.utils import ModelOutput

from linearize.checkpoint.loading import quiet
from linearize.core.errors import CheckpointError, ConfigError, TrainingError
from linearize.core.registry import Values
from linearize.modeling.model import kernel_parameters
from linearize.training import sharding
from linearize.training.alignment.objective import hidden_state_loss
from linearize.training.processes import own_device, under_fsdp
from linearize.training.run import tokens_in
from linearize.training.stage_two.config import TuneConfig
from linearize.training.stage_two.metrics import label_losses
from linearize.training.stage_two.progress import LossMeter, meter_of
from linearize.training.stage_two.rows import IGNORED, Chosen, Predictions, Row, as_dataset, by_length
from linearize.training.stage_two.task_types.base import ClassLabels, NumberLabels, TaskData, first_output
from linearize.training.states import check_moments

WEIGHTS = "model.safetensors"
"""The file of the weights in a checkpoint."""
KERNEL_RATE = 3e-4
"""Peak rate of the kernels with a teacher (RADLADS 2a uses 1e-4 for its mixers, and 1e-5 for the rest)."""


class Tuner(Trainer):
    """Trains and measures one model on one task.

    Args:
        model: a model with the task's head, or its wrapper for measuring (`TaskType.wrap`).
        data: rows for training, selection and measuring.
        config: stage two's options.
        folder: folder for checkpoints.
        teacher: a frozen softmax model on the model's device; None for labels alone, without `data.extra`.
        on_log: called with every entry of the log.
    """

    model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        data: TaskData,
        config: TuneConfig,
        folder: str | Path,
        *,
        teacher: PreTrainedModel | None = None,
        on_log: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        self.data, self.tune, self.teacher, self.selecting = data, config, teacher, False
        self.selection = None if data.selection is None else as_dataset(data.selection)
        train = as_dataset(data.train)
        self.order = by_length(data.validation)
        validation = data.validation if self.order is None else Chosen(data.validation, self.order)
        extra = data.extra if teacher is not None else None
        self.on_log, self.tokens = on_log, 0
        # An epoch seeds it (`Hooks`): transformers' groups of similar length depend on all random numbers before them.
        self.groups = torch.Generator()
        self._parts: dict[str, list[Tensor]] = {}
        # Under FSDP the given model stays in its files or on the host.
        device = own_device("auto") if under_fsdp() else next(model.parameters()).device.type
        super().__init__(
            model=model,
            args=training_arguments(data, config, folder, device),
            train_dataset=ConcatDataset([train, as_dataset(extra)]) if extra else train,
            eval_dataset=as_dataset(validation),
            data_collator=data.collate,
            compute_metrics=self.compute_task_metrics,
            preprocess_logits_for_metrics=data.type.reduce,  # type: ignore[arg-type]
            callbacks=[LossMeter(), *([EarlyStoppingCallback(config.patience)] if config.patience else [])],
        )
        self.remove_callback(PrinterCallback)
        # The trainer divides the loss of a pass, a mean over its batch, by the passes of a step. It does not where it
        # takes the loss for a sum over the labels of all passes (`num_items_in_batch`), as `compute_loss` returns it
        # here. By itself it assumes that of every model with extra keywords, but many accept and ignore them.
        self.model_accepts_loss_kwargs = data.type.next_token and teacher is None
        self.shards: sharding.Shards | None = None
        if self.is_fsdp_enabled:
            assert isinstance(model, PreTrainedModel)
            self.shards = sharding.Shards(model, self.accelerator, in_fp32=config.precision == "no")
            self._use(self.shards.model)
            if teacher is not None:
                self.teacher = sharding.frozen_copy(teacher, self.accelerator, next(model.parameters()).dtype)

    def create_accelerator_and_postprocess(self) -> None:
        """Start FSDP if it was asked for, also on CPUs, where accelerate does not."""
        super().create_accelerator_and_postprocess()
        if under_fsdp():
            sharding.start_fsdp(self.accelerator)
            self.is_fsdp_enabled = True

    def _use(self, model: PreTrainedModel) -> None:
        """Train and measure a sharded model; this adds autocast, as accelerate does for a model that is not sharded."""
        self.model = self.model_wrapped = model
        self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)

    def end_sharding(self, model: PreTrainedModel) -> None:
        """Measure a sharded copy of the given model from now on; what was trained is freed."""
        self.shards = self.optimizer = self.lr_scheduler = None
        self.callback_handler.model = self.callback_handler.optimizer = None
        self.model = self.model_wrapped = model
        self.accelerator.free_memory()
        gc.collect()
        self._use(sharding.frozen_copy(model, self.accelerator, sent=sharding.in_main(model)))

    def compute_task_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return the task's metrics and its score, and keep the metrics with the predictions and the labels."""
        predictions, labels = (self._as_given(values) for values in (prediction.predictions, prediction.label_ids))
        found = self.data.type.compute_metrics(predictions, labels)
        metrics = {name: float(value) for name, value in found.items()}
        self.measured: tuple[dict[str, float], Predictions, Predictions] = (metrics, predictions, labels)
        return metrics | {"score": self.data.task.mean_of(metrics)}

    def _as_given(self, values: Any) -> Any:
        """Return outputs or labels of the validation rows in the order of the rows in `data`."""
        if self.order is None:
            return values
        return tuple(map(self._as_given, values)) if isinstance(values, tuple) else values[np.argsort(self.order)]

    def measure(self) -> tuple[dict[str, float], Predictions, Predictions]:
        """Return the task's metrics on the validation rows, the predictions, and the labels."""
        with quiet():
            self.evaluate()
        return self.measured

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Return the optimizer; kernels with a separate rate get separate parameter groups."""
        optimizer = super().create_optimizer(model)
        rate = self.tune.kernel_learning_rate
        if rate is None and self.teacher is not None:
            rate = KERNEL_RATE
        if rate is None:
            return optimizer
        kernels = {id(parameter) for parameter in kernel_parameters(self.model)}
        for group in list(optimizer.param_groups):
            in_kernels = [parameter for parameter in group["params"] if id(parameter) in kernels]
            if in_kernels:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in kernels]
                optimizer.add_param_group({**group, "params": in_kernels, "lr": rate})
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Return the schedule; a single step has no warm-up, whose first rate is 0."""
        if num_training_steps == 1:
            self.args.warmup_steps = 0
        return super().create_scheduler(num_training_steps, optimizer)

    def _get_train_sampler(self, train_dataset: Dataset[Row] | None = None) -> Sampler[int] | None:
        sampler: Sampler[int] | None = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.generator = self.groups
        return sampler

    def label_weight(self) -> float:
        """Return the weight of the labels at this step: 0 at first, then a linear rise."""
        done = self.state.global_step / max(1, self.state.max_steps)
        late, ramp = done - self.tune.labels_from, self.tune.labels_ramp
        share = 0.0 if late < 0 else 1.0 if late >= ramp else late / ramp
        return self.tune.labels_weight * share

    def get_batch_samples(
        self, epoch_iterator: Iterator[Row], num_batches: int, device: torch.device
    ) -> tuple[list[Row], Tensor | int | None]:
        """Return the batches of a step, and how many tokens they predict; the first of a row is never predicted."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.model_accepts_loss_kwargs and batches:
            count = sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in batches).to(device)
            count = count if self.args.world_size == 1 else self.accelerator.gather(count).sum()
        return batches, count

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, ModelOutput]:
        """Return the loss of a batch: the distance from the teacher while training with one, else the model's own."""
        if self.teacher is None or not (model.training or self.selecting):
            if self.data.type.next_token:
                outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
                loss = self.data.type.label_loss(outputs, inputs)
                if num_items_in_batch is not None:
                    # A share of the step's mean; the gradient is a mean over the processes.
                    share = (inputs["labels"][:, 1:] != IGNORED).sum() / num_items_in_batch
                    loss = loss * share * self.accelerator.num_processes
                return (loss, outputs) if return_outputs else loss
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        tune, label_weight = self.tune, self.label_weight()
        if self.selecting:
            # The divergence from the teacher, and the loss on the labels if they join.
            label_weight = tune.final_labels_weight
            outputs, taught = self._outputs(model, inputs, labelled=label_weight > 0)
            loss = self.data.type.teacher_loss(outputs, taught, inputs)
            if label_weight:
                loss = tune.teacher_logits_weight * loss + label_weight * self.data.type.label_loss(outputs, inputs)
            return loss, outputs
        weights = {"hidden": tune.teacher_hidden_weight, "logits": tune.teacher_logits_weight, "task": label_weight}
        outputs, taught = self._outputs(model, inputs, labelled=label_weight > 0, hidden=weights["hidden"] > 0)
        parts = {}
        if weights["hidden"]:
            mask = inputs.get("attention_mask")
            parts["hidden"] = hidden_state_loss(layer_states(outputs), layer_states(taught), mask)
        if weights["logits"]:
            parts["logits"] = self.data.type.teacher_loss(outputs, taught, inputs, temperature=tune.temperature)
        if weights["task"]:
            parts["task"] = self.data.type.label_loss(outputs, inputs)
        loss = torch.zeros((), device=self.args.device)
        for name, part in parts.items():
            loss = loss + weights[name] * part
            self._parts.setdefault(name, []).append(part.detach().float())
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: Values, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Do one step, and add its loss to the sum over the whole run, resumed or not."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        meter_of(self).total += loss.detach().float()
        self.tokens += tokens_in(inputs) * self.args.world_size
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write an entry of the log, with the means of the loss's parts since the last one, and report it.

        Raises:
            TrainingError: if a loss or the gradient is not finite.
        """
        if "train_loss" in logs and self.args.world_size == 1:
            # transformers takes the mean over the steps since the last resume.
            logs["train_loss"] = float(meter_of(self).total) / max(1, self.state.global_step)
        if "loss" in logs:
            logs |= {f"loss_{name}": float(torch.stack(parts).mean()) for name, parts in self._parts.items()}
            self._parts = {}
        super().log(logs, start_time)
        step = self.state.global_step
        scaler = self.accelerator.scaler
        # In fp16 an infinite gradient is usual: its step is left out, and the scale of the loss halved.
        usual = scaler is not None and scaler.get_scale() >= 1
        for name in ("loss", "eval_loss", "eval_selection", *(() if usual else ("grad_norm",))):
            if not math.isfinite(logs.get(name, 0.0)):
                when = f"became {logs[name]} by step {step}" if step else f"is {logs[name]} before the first step"
                raise TrainingError(
                    f"stage two: {name} {when}; lower the learning rate, or check the model's weights and the data for "
                    "broken numbers"
                )
        if self.on_log is not None:
            self.on_log({"step": step, "steps": self.state.max_steps, **logs})

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Measure the validation rows, and the selection rows (`measure_selection`)."""
        output = super().evaluation_loop(*args, **kwargs)
        if self.selection is not None and output.metrics is not None:
            output.metrics.update(self.measure_selection())
        return output

    def prediction_step(
        self, model: nn.Module, inputs: Row, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return loss, outputs and labels of a batch; its loss leaves out rows that only fill the last batch."""
        found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        state, size = self.accelerator.gradient_state, find_batch_size(inputs)
        if self.args.world_size == 1 or found[0] is None or not state.end_of_dataloader or state.remainder <= 0:
            return found
        if any(getattr(x, "shape", ())[:1] != (size,) for x in inputs.values()):
            return found
        # Several processes repeat rows from the beginning; the trainer drops their outputs, but their loss is a mean.
        # Each takes the mean over its own rows: counting the tokens of all processes would give the first rows more.
        real = max(1, state.remainder - self.args.process_index * size)
        rows = self._prepare_inputs({name: x[:real] for name, x in inputs.items()})
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, rows, return_outputs=True)[0]
        return (loss.detach().mean(), *found[1:])

    def measure_selection(self) -> dict[str, float]:
        """Return the mean, over the held-out rows, of the loss that applies at the end of training (`eval_selection`).

        Without a teacher, that is the model's own loss; with one, the divergence from it, and the loss on the labels if
        they join: by the divergence alone, a state from before the labels joined would always win. The loss on classes
        is that at the best temperature: a tuned model soon becomes overconfident, which raises its loss while it still
        gets better (Berta et al. 2025, arXiv 2501.19195). If each row has one label that counts, the result includes
        the standard error of the loss on the labels (`eval_selection_error`).
        """
        weight = 1.0 if self.teacher is None else self.tune.final_labels_weight
        rowwise = weight > 0 and isinstance(self.data.type, ClassLabels | NumberLabels)
        metrics, self.selecting, self.compute_metrics = self.compute_metrics, True, losses_of
        try:
            rows = self.get_eval_dataloader(self.selection)
            found = super().evaluation_loop(rows, "Selection", not rowwise, metric_key_prefix="selection").metrics
        finally:
            self.selecting, self.compute_metrics = False, metrics
        assert found is not None
        if not rowwise:
            return {"eval_selection": found["selection_loss"]}
        loss = found["selection_loss"] - weight * found["selection_excess"]
        return {"eval_selection": loss, "eval_selection_error": weight * found["selection_error"]}

    def _determine_best_metric(self, metrics: dict[str, float], trial: object) -> bool:
        """Keep the latest state whose loss on the held-out rows is within a standard error of the lowest.

        On few rows the lowest loss is often chance, and a falling rate favours late states (Hastie, Tibshirani and
        Friedman 2009, The Elements of Statistical Learning, section 7.10). If the start has the lowest loss, it stays.
        """
        if self.selection is None:
            return super()._determine_best_metric(metrics, trial)
        measured = [entry for entry in self.state.log_history if "eval_selection" in entry]
        lowest = min(measured, key=lambda entry: entry["eval_selection"])
        error = lowest.get("eval_selection_error", 0.0) if lowest["step"] else 0.0
        if metrics["eval_selection"] > lowest["eval_selection"] + error:
            return False
        # Early stopping compares with this figure: with that of the kept state, losses that go up and down never end.
        self.state.best_metric, self.state.best_global_step = lowest["eval_selection"], self.state.global_step
        return True

    def keep_start(self) -> None:
        """Measure the state before the first step on the held-out rows, and keep it until there is a better one.

        A well-aligned model has little to gain from stage two, so this state may be the best.
        """
        # The measurement must not change the random numbers that the training draws.
        with torch.random.fork_rng(devices=()):
            measured = self.measure_selection()
        self.log(measured)
        folder = Path(self.args.output_dir or "") / f"{PREFIX_CHECKPOINT_DIR}-0"
        # Only the weights: a resumed run starts from the beginning.
        self.save_model(str(folder), _internal_call=True)
        self.state.best_metric, self.state.best_global_step = measured["eval_selection"], 0
        self.state.best_model_checkpoint = str(folder)

    def _outputs(
        self, model: nn.Module, inputs: dict[str, Tensor], *, labelled: bool, hidden: bool = False
    ) -> tuple[Any, Any]:
        """Return the outputs of the model and of its teacher on a batch, in the same precision.

        The model gets the labels only if its own loss on them is needed (`labelled`): rows with one label each, and
        next tokens, have another loss (`TaskType.label_loss`).
        """
        assert self.teacher is not None
        fields = {name: value for name, value in inputs.items() if name not in self.data.type.label_fields}
        given = inputs if labelled and not (self.data.type.row_labels or self.data.type.next_token) else fields
        outputs = model(**given, output_hidden_states=hidden)
        with torch.no_grad(), self.accelerator.autocast():
            return outputs, self.teacher(**fields, output_hidden_states=hidden)

    def restore(self, checkpoint: Path) -> None:
        """Load the kept weights and the state of a run that had ended."""
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        self.state.best_model_checkpoint = self.state.best_model_checkpoint or str(checkpoint)
        self._load_best_model()
        # transformers logs it after the last state.
        kept: Any = self.state.stateful_callbacks
        total = meter_of(self).total = float(kept[LossMeter.__name__]["attributes"]["total"])
        self.log({"train_loss": total / max(1, self.state.global_step)})

    def _load_best_model(self) -> None:
        """Load the best checkpoint in the run's current folder; without it transformers would keep the last weights."""
        best = Path(self.args.output_dir or "") / Path(str(self.state.best_model_checkpoint)).name
        self.state.best_model_checkpoint = str(best)
        if self.is_world_process_zero() or self.shards:
            self._load_from_checkpoint(str(best))
        if self.args.world_size > 1 and not self.shards:  # Other machines may not have that folder.
            broadcast(dict(self.model.state_dict()))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint; transformers would skip those with other names without warning.

        Raises:
            CheckpointError: if they are gone, or do not fit the model.
        """
        folder = Path(resume_from_checkpoint)
        try:
            if self.shards:
                self.shards.load(folder)
            else:
                load_model(self.model, folder / WEIGHTS)
        except FileNotFoundError:
            raise CheckpointError(
                f"stage two: the weights of the state {resume_from_checkpoint!r} are missing, expected them to be kept "
                "until the end; run it again without --resume"
            ) from None
        except (RuntimeError, OSError, SafetensorError) as error:
            raise CheckpointError(
                f"stage two: {resume_from_checkpoint!r} does not fit the model ({' '.join(str(error).split())[:200]}); "
                "delete that folder and start again"
            ) from None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.shards and checkpoint is not None:
            self.shards.load_moments(self.optimizer, self.lr_scheduler, Path(checkpoint))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.optimizer is not None:
            check_moments(self.optimizer)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.shards:
            self.shards.save_moments(self.optimizer, self.lr_scheduler, Path(output_dir))
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights under the names of the model's modules; transformers saves some models under older ones."""
        folder = Path(output_dir or self.args.output_dir or "")
        if self.shards:
            self.shards.save(folder)
        elif self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            save_model(self.model, str(folder / WEIGHTS), {"format": "pt"})


def losses_of(prediction: EvalPrediction) -> dict[str, float]:
    """Return the `label_losses` of gathered outputs."""
    return label_losses(np.asarray(first_output(prediction.predictions)), np.asarray(prediction.label_ids))


def layer_states(outputs: object) -> tuple[Tensor, ...]:
    """Return the hidden states [B, T, C], or [B, H, W, C] of an image, after every layer, without the embeddings.

    Raises:
        ConfigError: if the model's outputs have no hidden states.
    """
    names = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
    groups = [states for name in names if (states := getattr(outputs, name, None))]
    if not groups:
        raise ConfigError(
            "teacher: the model gives no hidden states; set teacher_hidden_weight to 0, to learn from the logits alone"
        )
    # Images [B, C, H, W], as timm and SegFormer return them, do not begin with the embeddings, as rows of tokens do.
    layers = [[x.movedim(1, -1) for x in states] if states[0].ndim == 4 else states[1:] for states in groups]
    return tuple(state for states in layers for state in states)


def training_arguments(data: TaskData, config: TuneConfig, folder: str | Path, device: str) -> TrainingArguments:
    """Return the options in transformers' form."""
    held_out = data.selection is not None
    on_cpu = device == "cpu"
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
        # Keep the best and the last: if the result cannot be written, a resume from the last saves it at once.
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="selection" if held_out else "score",
        greater_is_better=not held_out and not data.task.lower_is_better,
        restore_callback_states_from_checkpoint=True,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        # `finetune` adds trackers itself: an evaluation has none.
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        remove_unused_columns=False,
        label_names=list(data.type.label_fields),
        seed=config.seed,
        data_seed=config.seed,
    )
