"""transformers' Trainer with what stage two adds: a teacher, a rate for kernels, and rows to choose on.

The loss with a teacher is CALD's (ICLR 2025, arXiv 2410.06846) and TinyBERT's (arXiv 1909.10351): the hidden states of
every layer and the logits, with the labels joining later.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput
from transformers.utils import ModelOutput

from linearize.alignment.losses import hidden_state_loss, logits_loss
from linearize.errors import CheckpointError, ConfigError
from linearize.finetune.config import TuneConfig
from linearize.finetune.loss_meter import meter_of
from linearize.finetune.prepared import IGNORED, RowSet
from linearize.finetune.tasks import TASK_TYPES
from linearize.modeling.model import kernel_parameters

LABELS = ("labels", "start_positions", "end_positions")
BY_ROW = ("classification", "regression")
"""Kinds of tasks with one label per row, which rows for a teacher alone have none of."""
PER_TOKEN = tuple(name for name, type in TASK_TYPES.items() if type.next_token)
"""Kinds whose models sum the loss over tokens and divide by those of all passes."""
KERNEL_RATE = 3e-4
"""Peak rate of the kernels where a teacher guides them (RADLADS 2a has 1e-4 for its mixers, and 1e-5 for the rest)."""
FAR_BELOW = -1e4
"""Logit of a padded place that is no answer."""


class Tuner(Trainer):
    """transformers' Trainer, with a teacher and rows to choose the kept state on where they are given.

    Args:
        kind: the task's kind (`linearize.finetune.tasks.KINDS`).
        config: stage two's options.
        teacher: a frozen softmax model on the model's device; None: labels alone.
        selection: rows held out of the training rows; None: nothing is chosen on such rows.
        **options: see `transformers.Trainer`.
    """

    def __init__(
        self,
        *,
        kind: str,
        config: TuneConfig,
        teacher: PreTrainedModel | None,
        selection: RowSet | None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.kind, self.tune, self.teacher, self.selection = kind, config, teacher, selection
        self._parts: dict[str, list[Tensor]] = {}
        if kind not in PER_TOKEN:
            # The loss of a pass is a mean over its batch, which accumulation has to divide. The trainer believes that a
            # model which takes further keywords divides by the labels of all passes; classifiers take and ignore them.
            self.model_accepts_loss_kwargs = False
        if teacher is not None:
            self.loss_is_scaled_for_ga = False

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Build the optimizer; kernels get parameter groups of their own where they have a rate of their own."""
        made = super().create_optimizer(model)
        rate = self.tune.kernel_learning_rate
        if rate is None and self.teacher is not None:
            rate = KERNEL_RATE
        if rate is None:
            return made
        kernels = {id(parameter) for parameter in kernel_parameters(self.model)}  # type: ignore[arg-type]
        for group in list(made.param_groups):
            own = [parameter for parameter in group["params"] if id(parameter) in kernels]
            if own:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in kernels]
                made.add_param_group({**group, "params": own, "lr": rate})
        return made

    def label_weight(self) -> float:
        """Return the weight of the labels at this step: 0 at first, then a straight rise."""
        done = self.state.global_step / max(1, self.state.max_steps)
        late = done - self.tune.labels_from
        ramp = self.tune.labels_ramp
        share = 0.0 if late < 0 else 1.0 if late >= ramp else late / ramp
        return self.tune.labels_weight * share

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, ModelOutput]:
        """Return the loss of a batch: with a teacher its guidance while training, else the model's own."""
        if self.teacher is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        weight = self.label_weight()
        fields = {name: value for name, value in inputs.items() if name not in LABELS}
        unlabelled = weight == 0 or self.kind in BY_ROW
        hidden = self.tune.teacher_hidden_weight > 0
        outputs = model(**(fields if unlabelled else inputs), output_hidden_states=hidden)
        theirs = self._taught(fields, hidden=hidden)
        parts = {}
        if hidden:
            mask = fields.get("attention_mask")
            parts["hidden"] = hidden_state_loss(layer_states(outputs), layer_states(theirs), mask)
        if self.tune.teacher_logits_weight:
            parts["logits"] = output_loss(self.kind, outputs, theirs, inputs, temperature=self.tune.temperature)
        loss = sum(
            (getattr(self.tune, f"teacher_{name}_weight") * part for name, part in parts.items()),
            start=torch.zeros((), device=self.args.device),
        )
        if weight:
            parts["task"] = self._label_loss(outputs, inputs)
            loss = loss + weight * parts["task"]
        self._note(parts)
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """See `Trainer.training_step`; the loss is summed up over the whole run, resumed or not."""
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        meter_of(self).total += loss.detach().float()
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the loss to an entry that has one: means since the last entry."""
        if "train_loss" in logs and self.args.world_size == 1:
            # transformers takes the mean over the steps since the last resume.
            logs["train_loss"] = float(meter_of(self).total) / max(1, self.state.global_step)
        if "loss" in logs:
            logs |= {f"loss_{name}": float(torch.stack(parts).mean()) for name, parts in self._parts.items()}
            self._parts = {}
        super().log(logs, start_time)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Measure the validation rows, and beside them (`eval_selection`) the rows to choose on."""
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self.selection is not None:
            output.metrics[f"{metric_key_prefix}_selection"] = self.measure_selection()  # type: ignore[index]
        return output

    @torch.no_grad()
    def measure_selection(self) -> float:
        """Return the mean over the held-out rows of what the end of the training lowers.

        Without a teacher that is the model's own loss; with one the divergence from it, and the loss on the labels
        where they join. By the divergence alone a state from before the labels would win, whatever they brought. Every
        process measures all of these rows: shared out, some would count twice.
        """
        model, rows = self.model, self.selection
        assert isinstance(model, nn.Module) and rows is not None
        model.eval()
        total = torch.zeros(2, device=self.args.device, dtype=torch.float32)
        rows_once = DataLoader(rows, batch_size=self.args.eval_batch_size, collate_fn=self.data_collator)
        for batch in rows_once:
            inputs = self._prepare_inputs(batch)
            count = len(next(iter(inputs.values())))
            with self.compute_loss_context_manager(), self.accelerator.autocast():
                if self.teacher is None:
                    value: Any = super().compute_loss(model, inputs)
                else:
                    value = self._selection_loss(model, inputs)
            total += torch.stack([value.float() * count, torch.tensor(float(count), device=total.device)])
        # The same figure everywhere, to the bit: by it all processes stop, or none.
        return float(self.accelerator.reduce(total[0] / total[1], "mean"))

    def keep_start(self) -> None:
        """Measure the state that training begins with on the held-out rows, and keep it until a better one comes.

        A model that was aligned well has little to gain from stage two, and what it begins with may be the best.
        """
        # The training draws the same numbers as if nobody had looked.
        with torch.random.fork_rng(devices=()):
            value = self.measure_selection()
        self.log({"eval_selection": value})
        folder = Path(self.args.output_dir or "") / f"{PREFIX_CHECKPOINT_DIR}-0"
        # Weights alone: there is nothing yet that a resume could go on from.
        self.save_model(str(folder), _internal_call=True)
        self.state.best_metric, self.state.best_global_step = value, 0
        self.state.best_model_checkpoint = str(folder)

    def _selection_loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return the divergence from the teacher on a batch, and the loss on its labels where they join."""
        fields = {name: value for name, value in inputs.items() if name not in LABELS}
        weight = self.tune.final_labels_weight
        mine = model(**(fields if self.kind in BY_ROW or not weight else inputs))
        value = output_loss(self.kind, mine, self._taught(fields), inputs)
        if not weight:
            return value
        return self.tune.teacher_logits_weight * value + weight * self._label_loss(mine, inputs)

    def _label_loss(self, outputs: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the loss on a batch's labels: the model's own, but of rows of which some have none."""
        if self.kind in BY_ROW:
            return label_loss(self.kind, outputs.logits, inputs["labels"])
        loss: Tensor = outputs.loss
        return loss

    def _taught(self, fields: Mapping[str, Tensor], *, hidden: bool = False) -> Any:
        """Run the teacher on a batch in the student's precision."""
        assert self.teacher is not None
        with torch.no_grad(), self.accelerator.autocast():
            return self.teacher(**fields, output_hidden_states=hidden)

    def _note(self, parts: Mapping[str, Tensor]) -> None:
        for name, part in parts.items():
            self._parts.setdefault(name, []).append(part.detach().float())

    def restore(self, checkpoint: Path) -> None:
        """Take up a run that had come to its end, with the weights that it chose."""
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        if self.state.best_model_checkpoint is None:
            self._load_from_checkpoint(str(checkpoint))
        else:
            self._load_best_model()

    def gather_into(self, model: PreTrainedModel) -> None:
        """Bring the tuned weights into the model that was given; it is the one that was trained."""

    def _load_best_model(self) -> None:
        """Load the best weights from where the run lies now; transformers would keep the last without a word.

        Raises:
            CheckpointError: if they are not there any more.
        """
        best = Path(self.args.output_dir or "") / Path(str(self.state.best_model_checkpoint)).name
        if not any(best.glob("*.safetensors")):
            raise CheckpointError(
                f"stage two: the weights of the best state, {str(best)!r}, are missing, expected them to lie there "
                "until the end; run it again without --resume"
            )
        self.state.best_model_checkpoint = str(best)
        self._load_best(best)

    def _load_best(self, folder: Path) -> None:
        """Load the weights of a whole checkpoint, `state.best_model_checkpoint`."""
        super()._load_best_model()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write weights under the names that the model's modules have.

        transformers saves some models (ViT) under older names, and its trainer looks for the modules' own when it
        resumes or takes the best checkpoint, and passes over all others without a word.
        """
        model = self.accelerator.unwrap_model(self.model)
        if not isinstance(model, PreTrainedModel):
            super()._save(output_dir, state_dict)
            return
        model.save_pretrained = partial(model.save_pretrained, save_original_format=False)  # type: ignore[method-assign]
        try:
            super()._save(output_dir, state_dict)
        finally:
            del model.save_pretrained


def layer_states(outputs: Any) -> tuple[Tensor, ...]:
    """Return the hidden states [B, T, C] after every layer; those of the embeddings are left out.

    Raises:
        ConfigError: if the model gives none.
    """
    names = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
    found = [states[1:] for name in names if (states := getattr(outputs, name, None))]
    if not found:
        raise ConfigError(
            "teacher: the model gives no hidden states; set teacher_hidden_weight to 0, to learn from the logits alone"
        )
    return tuple(state for states in found for state in states)


def output_loss(
    kind: str, student: Any, teacher: Any, inputs: Mapping[str, Tensor], *, temperature: float = 1.0
) -> Tensor:
    """Return how far a model's outputs are from the teacher's on a batch, where the task looks at them.

    Args:
        kind: the task's kind.
        student: the model's outputs.
        teacher: the teacher's outputs.
        inputs: the batch with its labels.
        temperature: of both softmaxes.

    Returns:
        A scalar: a mean over rows; over tokens where each has a prediction; a squared error for numbers.
    """
    if kind == "question-answering":
        mask = inputs.get("attention_mask")
        pairs = [(student.start_logits, teacher.start_logits), (student.end_logits, teacher.end_logits)]
        if mask is not None:
            pairs = [(a.masked_fill(mask == 0, FAR_BELOW), b.masked_fill(mask == 0, FAR_BELOW)) for a, b in pairs]
        return torch.stack([logits_loss(a, b, temperature=temperature) for a, b in pairs]).mean()
    mine, theirs = student.logits, teacher.logits
    if mine.ndim == 2:
        return logits_loss(mine, theirs, temperature=temperature, regression=kind == "regression")
    labels = inputs["labels"]
    if kind in PER_TOKEN:
        # The prediction at a place is of the next token.
        mine, theirs, labels = mine[:, :-1], theirs[:, :-1], labels[:, 1:]
    return logits_loss(mine, theirs, temperature=temperature, mask=labels != IGNORED)


def label_loss(kind: str, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss on the labels [B] of the rows that have one; 0 where none has.

    Args:
        kind: classification (cross-entropy) or regression (squared error).
        logits: [B, C] or [B, 1].
        labels: classes, `IGNORED` for none; or numbers, NaN for none.
    """
    known = ~labels.isnan() if kind == "regression" else labels != IGNORED
    if not known.any():
        return logits.float().sum() * 0.0
    mine, target = logits[known].float(), labels[known]
    if kind == "regression":
        return functional.mse_loss(mine.squeeze(-1), target.float())
    return functional.cross_entropy(mine, target)
