"""Gather all data of a report: load, run and measure; nothing is drawn or written here.

A report opens with a sentence that says how close to softmax the model is, how fast, and up to which length.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import Tensor

from linearize.checkpoint.inspect import CheckpointInfo, inspect_checkpoint
from linearize.checkpoint.loading import Loaded, check_device, load_converted
from linearize.checkpoint.provenance import LOG, STAGE_ONE, STAGE_TWO, read_log
from linearize.conversion.positions import current_image_size, current_length, runs_beyond_limit
from linearize.core.errors import DataError, LinearizeError
from linearize.core.events import Callback, Started, ignore
from linearize.core.options import name_of
from linearize.evaluation.bench.job import measure
from linearize.evaluation.bench.meter import Noise
from linearize.evaluation.bench.models import BenchModel, PairSuite
from linearize.evaluation.bench.rows import Row
from linearize.evaluation.options import ReportOptions, lengths_within
from linearize.evaluation.report.inputs import Measured, measure_checkpoint
from linearize.fidelity.ablate import kernel_merit
from linearize.fidelity.maps import LayerMaps, attention_maps

MAP_TOKENS = 32
"""Tokens of a text in an attention map."""
TURNS = 7
"""Forward passes per length with softmax, and with kernels."""
SAME = 0.05
"""Two forward passes are equally fast if their times differ by at most this share."""
OTHER_SOFTMAX = (
    "This checkpoint's weights were trained after stage one (alignment or stage two). The softmax shown here uses the "
    "trained weights, which are no longer the original's, so the distance of the kernels from it says little. Compare "
    "the whole model's output with the original's instead."
)


@dataclass
class Gathered(Measured):
    """All data of a report.

    Attributes:
        info: facts about the checkpoint.
        log: lines of the checkpoint's log.
        picture: the first image as the model gets it, [C, height, width], or None.
        maps: attention maps of the first input.
        speeds: one row per length.
        noise: how noisy the machine was; None if nothing was timed.
        left_out: missing parts of the report, with the reasons.
    """

    info: CheckpointInfo
    log: list[dict[str, object]]
    picture: Tensor | None = None
    maps: list[LayerMaps] = field(default_factory=list)
    speeds: list[Row] = field(default_factory=list)
    noise: Noise | None = None
    left_out: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """Return the numbers as plain data."""
        plan = None if self.info.plan is None else self.info.plan.to_dict()
        info = {name: value for name, value in vars(self.info).items() if name not in ("plan", "provenance")}
        info["name"] = Path(name_of(self.info.name)).name
        return {
            "answer": answer(self),
            "checkpoint": info | {"plan": plan},
            "inputs": self.inputs,
            "fidelity": self.fidelity.to_dict(),
            "outputs": None if self.outputs is None else asdict(self.outputs),
            "speed": [row.side_by_side() for row in self.speeds],
            "noise": None if self.noise is None else self.noise.to_dict(),
            "notes": self.notes,
            "left_out": self.left_out,
        }


def gather(options: ReportOptions, on_event: Callback = ignore) -> Gathered:
    """Load a converted checkpoint and measure everything that a report shows.

    Args:
        options: the checkpoint, and what to measure.
        on_event: called with every event.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct.
    """
    device = check_device(options.device)
    on_event(Started("reading the checkpoint"))
    loaded = load_converted(options.checkpoint, device=device)
    info = inspect_checkpoint(options.checkpoint)
    made = info.provenance
    measured = measure_checkpoint(loaded, options.inputs, options.original, made, on_event)
    found = Gathered(**vars(measured), info=info, log=read_log(options.checkpoint))
    first, notes, left_out = found.first(MAP_TOKENS), found.notes, found.left_out
    if loaded.modality != "text":
        found.picture = first["pixel_values"][0]
    trained = made.weights_were_trained
    original = found.original.model if found.original and found.outputs else None
    if trained:
        notes.append(OTHER_SOFTMAX)
    if original is not None or not trained:
        merit = kernel_merit(loaded.model, found.batches, original if trained else None)
        against = " The model's other weights were trained together with the kernel." if trained else ""
        notes += [] if merit is None else [f"Control, compared with the original: {merit.text}.{against}"]
    elif made.numbers("kernel_merit"):
        left_out.append("The benefit of the kernel over its window, in the whole model: give --original.")
    if found.original is None:
        left_out.append(
            f"Whole outputs compared with the original's: {found.missing}; give it with --original. Elsewhere in "
            "this report, softmax means that the checkpoint's own layers compute softmax with the same weights."
        )
    elif found.outputs is None:
        left_out.append("Whole outputs compared with the original's: the two models' outputs differ in kind.")
    _time(found, loaded, options, on_event)
    try:
        found.maps = attention_maps(loaded.model, first)
    except DataError as error:
        left_out.append(f"Attention maps: {error}.")
    for stage, name in ((STAGE_ONE, "Stage one"), (STAGE_TWO, "Stage two")):
        if not any(line["stage"] == stage for line in found.log):
            left_out.append(f"{name}'s curves: the checkpoint has no {LOG} with lines of this stage.")
    return found


def _time(found: Gathered, loaded: Loaded, options: ReportOptions, on_event: Callback) -> None:
    """Measure time and memory at every length, or say in `left_out` why not."""
    size: int | None = None
    limit = current_length(loaded.model)
    if loaded.modality == "text":
        beyond = limit is not None and runs_beyond_limit(loaded.model)
        lengths = lengths_within(None if beyond else limit, options.lengths, found.notes)
        if beyond and limit is not None and lengths and lengths[-1] > limit:
            found.notes.append(
                f"Time was measured beyond the {limit:,} tokens that this checkpoint was made for: its rotary "
                "positions continue beyond that, but were never trained there."
            )
        what = f"{', '.join(f'{length:,}' for length in lengths)} tokens"
    else:
        height, width = current_image_size(loaded.model) or (0, 1)
        if height != width or limit is None:
            found.left_out.append("Time and memory: the images are not square, or their number of tokens is not known.")
            return
        size, lengths, what = height, [limit] if options.lengths else [], f"{height} x {width} pixels"
    if not lengths:
        found.left_out.append("Time and memory against length: no length to measure at (--lengths).")
        return
    on_event(Started(f"time and memory at {what}"))
    memory = loaded.model.device.type == "cpu" and Path(options.checkpoint).is_dir()
    if not memory:
        found.left_out.append("Memory against length: measured only on the CPU, for checkpoints in a folder.")
    suite = PairSuite(BenchModel.of(loaded.model, options.checkpoint if memory else None, lengths[-1], size))
    found.noise = Noise(suite.device)
    for tokens in lengths:
        try:
            row = measure(suite, tokens, repeats=TURNS, memory=memory)
        except LinearizeError as error:
            if not memory:
                raise
            # Memory is measured first. If that fails, the report still shows the time.
            found.left_out.append(f"Memory against length: {error}.")
            memory = False
            row = measure(suite, tokens, repeats=TURNS, memory=False)
        found.speeds.append(row)
        found.noise.probe()
    found.noise.stop()


def answer(found: Gathered) -> str:
    """Return the sentence that opens the report."""
    takes, trained = found.info.max_length, found.info.provenance.row_length
    if found.picture is not None:
        height, width = found.picture.shape[-2:]
        reads = f"it reads images of {height} x {width} pixels"
    else:
        reads = f"it takes up to {takes:,} tokens" if takes is not None else "it has no known maximum length"
        if trained is None:
            reads += ", and the checkpoint does not say which lengths it was trained on"
        else:
            reads += f", and it was trained on rows of up to {trained:,}"
    text = f"{_close(found)}; {_fast(found)}; {reads}."
    return text[0].upper() + text[1:]


def _close(found: Gathered) -> str:
    # The scores of stage two and of the original, from the checkpoint's record.
    tuned = found.info.provenance.part("finetuning")
    score, theirs, chance = tuned.number("score"), tuned.part("original").number("score"), tuned.number("chance")
    parts = []
    if score is not None:
        more = "" if theirs is None else f", the original {theirs:.3f}"
        more += "" if chance is None else f", chance {chance:.3f}"
        parts.append(f"according to its own record this model reaches {score:.3f} on {tuned.text('task')}{more}")
    if found.outputs is not None:
        whose = "its" if parts else "this model's"
        parts.append(f"{whose} outputs have a mean cosine of {found.outputs.cosine:.3f} to the original's")
    if parts:
        return " and ".join(parts)
    distance, error = found.fidelity.mean("total_variation"), found.fidelity.mean("output_error")
    how = (
        f"total variation {distance:.3f}, where 0 means equal"
        if distance is not None
        else f"error of the heads' output {error:.3f}"
    )
    return f"this model's attention was compared with its own softmax only ({how})"


def _fast(found: Gathered) -> str:
    timed = [(row, row.speedup) for row in found.speeds if row.speedup is not None]
    if not timed:
        return "its speed was not measured here"
    if found.noise is not None and found.noise.too_noisy:
        return "its speed is unknown, as the machine was too noisy"
    row, speedup = timed[-1]
    one = f"one input of {row.tokens:,} tokens" if found.picture is None else f"one image, {row.tokens:,} tokens,"
    if found.picture is None and _same(row, speedup):
        return f"{one} takes as long as with softmax"
    if found.picture is not None or speedup < 1:
        return f"{one} takes {1 / speedup:.2f} times as long as with softmax"
    slower = [other.tokens for other, times in timed if times <= 1 or _same(other, times)]
    short = f", one of {slower[-1]:,} is not faster" if slower else ""
    return f"{one} is processed {speedup:.2f} times as fast as with softmax{short}"


def _same(row: Row, speedup: float) -> bool:
    """Tell whether both variants take equally long, within `SAME` or the spread of the turns."""
    spreads = [variant.timing.spread / 2 for variant in row.variants.values() if variant.timing is not None]
    return abs(math.log(speedup)) <= max(math.log1p(SAME), sum(spreads))
