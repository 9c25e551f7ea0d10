"""All data of a report: loaded, run and measured; nothing is drawn or written here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from linearize.core.events import Callback, Started, ignore
from linearize.evaluation.report.options import ReportOptions, check_lengths

if TYPE_CHECKING:
    from linearize.checkpoint.inspect import CheckpointInfo
    from linearize.checkpoint.loading import Loaded
    from linearize.evaluation.bench.meter import Noise
    from linearize.evaluation.bench.rows import Row
    from linearize.evaluation.report.measure import Measured
    from linearize.evaluation.report.predictions import Changes
    from linearize.fidelity.maps import LayerMaps, LayerSpread
    from linearize.fidelity.measure import Fidelity, OutputDifference

MAP_TOKENS = 32
"""Tokens of a text whose maps are shown: as many as can be read on an axis."""
OTHER_SOFTMAX = (
    "This checkpoint's weights were trained after stage one (alignment or stage two). The softmax shown here is that "
    "of the trained weights, which are no longer the original's: how far its kernels are from it says little. What "
    "counts is the whole model's output against the original's."
)


@dataclass
class Gathered:
    """All data of a report.

    Attributes:
        info: facts about the checkpoint.
        inputs: the inputs in one line.
        fidelity: each layer against its own softmax.
        spreads: entropy and locally accumulated attention per layer.
        maps: attention maps of the first input.
        tokens: labels of the first input's tokens; empty for a picture.
        picture: the first picture as the model gets it, [C, height, width], or None.
        outputs: whole outputs against the original's, or None.
        changes: predictions compared with the original's, or None.
        speeds: one row per length.
        noise: how quiet the machine was; None if nothing was timed.
        log: lines of the checkpoint's log.
        notes: what the reader should know.
        left_out: what the report does not have, and why.
    """

    info: CheckpointInfo
    inputs: str
    fidelity: Fidelity
    spreads: list[LayerSpread]
    maps: list[LayerMaps]
    tokens: list[str]
    picture: Tensor | None
    outputs: OutputDifference | None
    changes: Changes | None
    speeds: list[Row]
    noise: Noise | None
    log: list[dict[str, object]]
    notes: list[str]
    left_out: list[str]

    def to_dict(self) -> dict[str, object]:
        """Return the numbers as plain data."""
        from linearize.evaluation.bench.side_by_side import Comparison
        from linearize.evaluation.report.answer import answer

        speeds = [Comparison.of(row) for row in self.speeds]
        plan = None if self.info.plan is None else self.info.plan.to_dict()
        info = {name: value for name, value in vars(self.info).items() if name not in ("plan", "provenance")}
        info["name"] = Path(self.info.name).name or self.info.name
        return {
            "answer": answer(self),
            "checkpoint": info | {"plan": plan},
            "inputs": self.inputs,
            "fidelity": self.fidelity.to_dict(),
            "spread": [asdict(spread) for spread in self.spreads],
            "outputs": None if self.outputs is None else asdict(self.outputs),
            "predictions": None if self.changes is None else asdict(self.changes),
            "speed": [asdict(speed) | {"speedup": speed.speedup} for speed in speeds],
            "noise": None if self.noise is None else self.noise.to_dict(),
            "notes": self.notes,
            "left_out": self.left_out,
        }


def gather(options: ReportOptions, on_event: Callback = ignore) -> Gathered:
    """Load a converted checkpoint and measure all that a report shows.

    Args:
        options: the checkpoint, and what to measure.
        on_event: called with what happens.

    Raises:
        LinearizeError: one of its children, for everything the user can correct.
    """
    from linearize.checkpoint.inspect import inspect_checkpoint
    from linearize.checkpoint.loading import check_device, load_converted
    from linearize.evaluation.report.inputs import token_labels
    from linearize.evaluation.report.measure import measure_checkpoint
    from linearize.fidelity.ablate import kernel_merit
    from linearize.fidelity.maps import measure_spread

    check_lengths(options.lengths, None)
    device = check_device(options.device)
    on_event(Started("reading the checkpoint"))
    loaded = load_converted(options.checkpoint, device=device)
    info = inspect_checkpoint(options.checkpoint)
    made = info.provenance
    seed = made.seed if made.seed is not None and made.seed >= 0 else 0
    measured = measure_checkpoint(
        loaded, options.inputs, options.original, seed=seed, provenance=made, on_event=on_event
    )
    inputs, notes, left_out = measured.inputs, list(measured.notes), []
    if made.weights_were_trained:
        notes.append(OTHER_SOFTMAX)
    elif (merit := kernel_merit(loaded.model, inputs.batches)) is not None:
        notes.append(f"Control: {merit.text}.")
    if measured.original is None:
        left_out.append(
            f"Whole outputs against the original's: {measured.missing}; give it with --original. The softmax shown "
            "everywhere else is the checkpoint's own: its layers computing softmax with the same weights."
        )
    elif measured.outputs is None:
        left_out.append("Whole outputs against the original's: the two models' outputs are of different kinds.")
    first = inputs.first(MAP_TOKENS)
    is_text = loaded.modality == "text"
    speeds, noise = _speeds(options, loaded, notes, left_out, on_event)
    return Gathered(
        info=info,
        inputs=inputs.description,
        fidelity=measured.fidelity,
        spreads=measure_spread(loaded.model, inputs.batches),
        maps=_maps(loaded, first, left_out),
        tokens=token_labels(loaded.processor, first["input_ids"][0]) if is_text else [],
        picture=None if is_text else first["pixel_values"][0],
        outputs=measured.outputs,
        changes=_changes(loaded, measured, left_out),
        speeds=speeds,
        noise=noise,
        log=_log(options.checkpoint, left_out),
        notes=notes,
        left_out=left_out,
    )


def _maps(loaded: Loaded, first: dict[str, Tensor], left_out: list[str]) -> list[LayerMaps]:
    from linearize.core.errors import DataError
    from linearize.fidelity.maps import attention_maps

    try:
        return attention_maps(loaded.model, first)
    except DataError as error:
        left_out.append(f"Attention maps: {error}.")
        return []


def _changes(loaded: Loaded, measured: Measured, left_out: list[str]) -> Changes | None:
    from linearize.evaluation.report.predictions import compare_predictions, has_predictions, why_not

    if not has_predictions(loaded):
        return None
    inputs, original = measured.inputs, measured.original
    reason = why_not(original, loaded, inputs.texts)
    if reason or original is None:
        left_out.append(f"The texts whose prediction changed most: {reason}.")
        return None
    return compare_predictions(original, loaded, inputs.texts, inputs.length)


def _speeds(
    options: ReportOptions, loaded: Loaded, notes: list[str], left_out: list[str], on_event: Callback
) -> tuple[list[Row], Noise | None]:
    from linearize.conversion.positions import current_image_size, current_length, runs_beyond_limit
    from linearize.evaluation.bench.side_by_side import Timed, measure_speed

    size: int | None = None
    if loaded.modality == "text":
        limit = current_length(loaded.model)
        beyond = limit is not None and runs_beyond_limit(loaded.model)
        lengths, dropped = check_lengths(options.lengths, None if beyond else limit)
        notes += dropped
        if beyond and limit is not None and lengths and lengths[-1] > limit:
            notes.append(
                f"Time was measured beyond the {limit:,} tokens that this checkpoint was made for: its rotary "
                "positions continue, but were never trained there."
            )
        what = f"{', '.join(f'{length:,}' for length in lengths)} tokens"
    else:
        height, width = current_image_size(loaded.model) or (0, 1)
        tokens = current_length(loaded.model)
        if height != width or tokens is None:
            left_out.append("Time and memory: pictures are not square here, or their tokens are not known.")
            return [], None
        size, lengths, what = height, [tokens] if options.lengths else [], f"{height} x {width} pixels"
    if not lengths:
        left_out.append("Time and memory against length: no length to measure at (--lengths).")
        return [], None
    on_event(Started(f"time and memory at {what}"))
    on_cpu = next(loaded.model.parameters()).device.type == "cpu"
    folder = options.checkpoint if on_cpu and Path(options.checkpoint).is_dir() else None
    if folder is None:
        left_out.append("Memory against length: measured for checkpoints in a folder, on the CPU, only.")
    rows, noise = measure_speed({loaded.name: Timed(loaded.model, lengths, folder, size)})
    return rows[loaded.name], noise


def _log(checkpoint: str, left_out: list[str]) -> list[dict[str, object]]:
    from linearize.checkpoint.log import LOG, STAGE_ONE, STAGE_TWO, read_log

    lines = read_log(checkpoint)
    for stage, name in ((STAGE_ONE, "Stage one"), (STAGE_TWO, "Stage two")):
        if not any(line["stage"] == stage for line in lines):
            left_out.append(f"{name}'s curves: the checkpoint has no {LOG} with lines of it.")
    return lines
