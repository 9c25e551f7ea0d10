"""Several conversions on the same inputs: which kernel, how close, how fast; as data, one table and one picture."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.errors import ConfigError
from linearize.events import Callback, Started, ignore
from linearize.report.noise import verdict, verdict_of_times
from linearize.report.options import CompareOptions

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from linearize.loading import Loaded

FIGURES = {
    "kl": "KL, nats per query",
    "total_variation": "total variation",
    "output_error": "output error per head",
    "negative_share": "share of negative weights",
    "cosine": "cosine to the original's outputs",
    "speedup": "times faster than softmax",
}
PER_INPUT = ("kl", "total_variation", "output_error")
"""Figures whose differences are tested over the inputs, beside the cosine."""
PICTURE, NUMBERS = "comparison.png", "comparison.json"


@dataclass(frozen=True)
class Conversion:
    """One conversion; figures are means over its layers.

    Attributes:
        name: of the folder.
        kernels: which, and in how many layers.
        parameters_added: learnable numbers of the kernels.
        kl: nats per query; None where no kernel has normalised weights.
        total_variation: the same.
        negative_share: the same.
        output_error: of the heads.
        cosine: of whole outputs to the original's; None without the original.
        seconds: of a forward at `tokens`; None where it was not timed.
        speedup: softmax's time over it.
        tokens: the longest length that was timed.
        layers: module, kernel and the first four figures of every layer.
        per_input: figures on each input alone, by name.
        seconds_spread: distance of the quartiles of the turns over `seconds`.
    """

    name: str
    kernels: str
    parameters_added: int
    kl: float | None
    total_variation: float | None
    negative_share: float | None
    output_error: float | None
    cosine: float | None
    layers: list[dict[str, object]]
    per_input: dict[str, list[float]] = field(default_factory=dict)
    seconds: float | None = None
    speedup: float | None = None
    tokens: int | None = None
    seconds_spread: float | None = None


@dataclass(frozen=True)
class Compared:
    """All of them, on the inputs said in one line, with what the reader has to know, and whether times are noise."""

    inputs: str
    conversions: list[Conversion]
    notes: list[str]
    noisy: bool = False
    verdicts: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self)


def compare_checkpoints(options: CompareOptions, on_event: Callback = ignore) -> Compared:
    """Measure several conversions on the same inputs, one after the other, and time all of them in turns.

    Raises:
        ConfigError: if there are fewer than two, or one reads text and another one images.
        LinearizeError: another of its children, for everything the user can put right.
    """
    from linearize.bench.side_by_side import Comparison, Timed, measure_speed
    from linearize.loading import check_converted, check_device, load_converted
    from linearize.report.lengths import check_lengths
    from linearize.surgery.positions import current_length

    if len(options.checkpoints) < 2:
        raise ConfigError(f"compare: got {len(options.checkpoints)} checkpoint, expected two or more; name another one")
    check_lengths(options.lengths, None)
    device = check_device(options.device)
    names = dict(zip(_names(options.checkpoints), options.checkpoints, strict=True))
    for checkpoint in options.checkpoints:
        check_converted(checkpoint)
    found: dict[str, Conversion] = {}
    timed: dict[str, Timed] = {}
    notes: list[str] = []
    inputs = modality = None
    for name, checkpoint in names.items():
        on_event(Started(f"measuring {name}"))
        loaded = load_converted(checkpoint, device=device)
        if modality is not None and loaded.modality != modality:
            raise ConfigError(
                f"compare: {name} reads {loaded.modality}, but {next(iter(names))} reads {modality}; compare models of "
                "the same inputs"
            )
        found[name], described = _one(name, loaded, options, notes)
        modality, inputs = loaded.modality, inputs or described
        if loaded.modality == "text":
            lengths, dropped = check_lengths(options.lengths, current_length(loaded.model))
            notes += [f"{name}: {note}" for note in dropped]
            if lengths:
                timed[name] = Timed(loaded.model, lengths[-1:])
    noisy = False
    if timed:
        on_event(Started("timing all of them in turns"))
        rows, noise = measure_speed(timed, options.repeats)
        noisy = noise.too_noisy
        if noisy:
            notes.append(f"No verdict on speed, the machine was {noise.text}.")
        for name, (row,) in rows.items():
            speed = Comparison.of(row)
            found[name] = replace(
                found[name],
                seconds=speed.linear_seconds,
                speedup=speed.speedup,
                tokens=speed.tokens,
                seconds_spread=speed.linear_spread,
            )
    conversions = list(found.values())
    return Compared(inputs or "", conversions, list(dict.fromkeys(notes)), noisy, verdicts(conversions, noisy=noisy))


def verdicts(conversions: Sequence[Conversion], *, noisy: bool = False) -> list[str]:
    """Say by each figure which conversion is the best, and which differences are noise."""
    found = []
    for name in (*PER_INPUT, "cosine"):
        values = {one.name: one.per_input[name] for one in conversions if name in one.per_input}
        if len(values) == len(conversions):
            found.append(verdict(FIGURES[name], values, larger_is_better=name == "cosine"))
    if noisy:
        return found
    timed = {one.name: (one.seconds, one.seconds_spread) for one in conversions}
    known = {name: (time, spread) for name, (time, spread) in timed.items() if time is not None and spread is not None}
    same = len({one.tokens for one in conversions}) == 1
    return [*found, verdict_of_times(known)] if len(known) == len(conversions) and same else found


def figures_per_input(
    model: PreTrainedModel, original: PreTrainedModel | None, batches: Sequence[dict[str, Tensor]]
) -> dict[str, list[float]]:
    """Measure each input alone; a figure that one of them has not is left out."""
    from linearize.fidelity.measure import measure_layers
    from linearize.fidelity.whole import output_difference

    found: dict[str, list[float]] = {}
    count = 0
    for batch in batches:
        for place in range(len(next(iter(batch.values())))):
            count += 1
            one = [{name: value[place : place + 1] for name, value in batch.items()}]
            fidelity = measure_layers(model, one)
            outputs = None if original is None else output_difference(original, model, one)
            values = {name: fidelity.mean(name) for name in PER_INPUT}
            values["cosine"] = None if outputs is None else outputs.cosine
            for name, value in values.items():
                if value is not None:
                    found.setdefault(name, []).append(value)
    return {name: values for name, values in found.items() if len(values) == count}


def _names(checkpoints: Sequence[str]) -> list[str]:
    """Shorten folders to their names, unless two would be the same."""
    names = [Path(checkpoint).name for checkpoint in checkpoints]
    return names if len(set(names)) == len(names) else list(checkpoints)


def _one(name: str, loaded: Loaded, options: CompareOptions, notes: list[str]) -> tuple[Conversion, str]:
    from linearize.attention.interface import linear_attentions
    from linearize.fidelity.measure import measure_layers
    from linearize.fidelity.whole import output_difference
    from linearize.modeling.model import kernel_parameters
    from linearize.report.inputs import load_inputs
    from linearize.report.original import cut_notes, find_original

    # The same seed for all, not each one's own: the inputs shall be the same.
    inputs = load_inputs(loaded, options.inputs)
    notes += [f"{name}: {note}" for note in inputs.notes]
    fidelity = measure_layers(loaded.model, inputs.batches)
    original, missing = find_original(options.original, loaded, str(loaded.model.device))
    if original is None:
        notes.append(f"{name}: no cosine to the original, as {missing}; give it with --original.")
    notes += [f"{name}: {note}" for note in cut_notes(original, inputs.batches)]
    outputs = None if original is None else output_difference(original.model, loaded.model, inputs.batches)
    kernels = Counter(layer.kernel for layer in linear_attentions(loaded.model).values())
    conversion = Conversion(
        name=name,
        kernels=", ".join(f"{count} x {kernel}" for kernel, count in kernels.items()),
        parameters_added=sum(p.numel() for p in kernel_parameters(loaded.model)),
        kl=fidelity.mean("kl"),
        total_variation=fidelity.mean("total_variation"),
        negative_share=fidelity.mean("negative_share"),
        output_error=fidelity.mean("output_error"),
        cosine=None if outputs is None else outputs.cosine,
        layers=[{key: value for key, value in asdict(layer).items() if key != "heads"} for layer in fidelity.layers],
        per_input=figures_per_input(loaded.model, None if original is None else original.model, inputs.batches),
    )
    return conversion, inputs.description


def timed_at(compared: Compared) -> str:
    """Say at which length the conversions were timed; there are several where some take shorter inputs."""
    lengths = sorted({conversion.tokens for conversion in compared.conversions if conversion.tokens})
    return " and ".join(f"{tokens:,}" for tokens in lengths) + " tokens" if lengths else ""


def write_comparison(compared: Compared, target: str, *, overwrite: bool = False) -> None:
    """Write the picture and the numbers to a folder, all or nothing.

    Raises:
        CheckpointError: if the folder cannot be used or written.
    """
    from linearize.checkpoint.output import atomic_folder
    from linearize.fidelity.plots_compare import compare_conversions
    from linearize.fidelity.plots_style import to_png
    from linearize.parsing import finite

    rows = [asdict(conversion) for conversion in compared.conversions]
    labels = {key: label for key, label in FIGURES.items() if any(row[key] is not None for row in rows)}
    if "speedup" in labels:
        labels["speedup"] += f", {timed_at(compared)}"
    png, _, _ = to_png(compare_conversions([row["name"] for row in rows], rows, labels))
    with atomic_folder(target, overwrite=overwrite) as folder:
        (folder / PICTURE).write_bytes(png)
        (folder / NUMBERS).write_text(json.dumps(finite(compared.to_dict()), indent=2) + "\n", encoding="utf-8")
