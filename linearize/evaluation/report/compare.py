"""Compare several conversions on the same inputs: kernels, closeness and speed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from linearize.attention.interface import linear_attentions
from linearize.checkpoint.fingerprint import data_digest
from linearize.checkpoint.loading import Loaded, check_converted, check_device, load_converted
from linearize.checkpoint.output import atomic_folder, claim
from linearize.checkpoint.provenance import Provenance
from linearize.conversion.positions import current_length
from linearize.core.errors import ConfigError, repeated
from linearize.core.events import Callback, Started, ignore
from linearize.core.options import name_of
from linearize.core.parsing import finite, user_path
from linearize.core.registry import Values
from linearize.evaluation.bench.meter import Call, Noise, in_turns
from linearize.evaluation.bench.models import BenchModel
from linearize.evaluation.options import CompareOptions, lengths_within
from linearize.evaluation.report.inputs import LENGTH, measure_checkpoint, measure_each_input
from linearize.evaluation.report.paired import SideDifference, best_by, fastest
from linearize.fidelity.plots import FIDELITY_FIGURES
from linearize.modeling.model import kernel_parameters

FIGURES = {
    "kl": "KL, nats per query",
    "total_variation": "total variation",
    "output_error": "output error per head",
    "cosine": "cosine to the original's outputs",
}
NUMBERS = "comparison.json"
OTHER_SOFTMAX = (
    "its weights were trained after stage one, so KL, TV and error are its distances from its own softmax, which is no "
    "longer the original's; go by the cosine."
)


@dataclass
class Conversion:
    """One conversion; the fidelity figures are means over its layers.

    Attributes:
        name: name of the folder.
        kernels: names of the kernels, with the number of layers of each.
        parameters_added: number of learnable parameters in the kernels.
        kl: KL divergence in nats per query; None if no kernel has normalised weights.
        total_variation: None if no kernel has normalised weights.
        negative_share: share of negative weights; None if no kernel has normalised weights.
        output_error: relative error of the heads' output.
        cosine: cosine of the whole model's output to the original's; None without the original.
        layers: module, kernel and the first four figures of every layer.
        per_input: figures on each input alone, by name.
        seconds: time of a forward pass at `tokens`; None if it was not timed.
        speedup: softmax's time divided by `seconds`.
        tokens: the longest length that was timed.
        seconds_spread: interquartile range of the turns divided by `seconds`.
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
    """All conversions.

    Attributes:
        inputs: the inputs, in one line.
        conversions: the conversions.
        notes: caveats for the reader.
        noisy: whether the machine was too noisy for the times to be compared.
        verdicts: one sentence per figure, naming the best conversion.
        differences: differences between the best conversion and every other, for each figure.
    """

    inputs: str
    conversions: list[Conversion]
    notes: list[str]
    noisy: bool = False
    verdicts: list[str] = field(default_factory=list)
    differences: list[SideDifference] = field(default_factory=list)

    @property
    def timed_at(self) -> str:
        """Lengths of the timings, several if some conversions take only shorter inputs; empty if not timed."""
        lengths = sorted({conversion.tokens for conversion in self.conversions if conversion.tokens})
        return " and ".join(f"{tokens:,}" for tokens in lengths) + " tokens" if lengths else ""


def compare_checkpoints(options: CompareOptions, on_event: Callback = ignore) -> Compared:
    """Measure several conversions on the same inputs, one after the other, and time all of them in turns.

    Raises:
        ConfigError: if there are fewer than two, or some read text and others images.
        LinearizeError: another subclass of it, for everything the user can correct.
    """
    names, device = _names(options), check_device(options.device)
    for checkpoint in options.checkpoints:
        check_converted(checkpoint)
    conversions: dict[str, Conversion] = {}
    timed: dict[str, BenchModel] = {}
    tokens: dict[str, str] = {}
    notes: list[str] = []
    options = _of_one_length(options, names, notes)
    inputs = modality = ""
    for name, checkpoint in zip(names, options.checkpoints, strict=True):
        on_event(Started(f"measuring {name}"))
        loaded = load_converted(checkpoint, device=device)
        if modality and loaded.modality != modality:
            raise ConfigError(
                f"compare: {name} reads {loaded.modality}, but {names[0]} reads {modality}; compare models of the same "
                "inputs"
            )
        conversions[name], described, tokens[name], warnings = _measure(name, loaded, options)
        modality, inputs = loaded.modality, inputs or described
        if loaded.modality == "text":
            lengths = lengths_within(current_length(loaded.model), options.lengths, warnings)
            if lengths:
                timed[name] = BenchModel.of(loaded.model, None, longest=lengths[-1])
        notes += [f"{name}: {warning}" for warning in warnings]
    other = [name for name in names if tokens[name] != tokens[names[0]]]
    if other:
        others = ", ".join(other)
        notes.append(
            f"No verdict on closeness: {others} and {names[0]} read the same texts as other tokens (another tokenizer)."
        )
    noisy = False
    if timed:
        on_event(Started("timing all checkpoints in turns"))
        calls: dict[tuple[str, str], Call] = {}
        for name, model in timed.items():
            # An observer that returns None makes a layer compute its softmax.
            calls[name, "softmax"] = model.forward(model.longest, observer=lambda *_: None)
            calls[name, "linear"] = model.forward(model.longest)
        noise = Noise(device)
        timings = in_turns(calls, options.repeats)
        noisy = noise.stop().too_noisy
        if noisy:
            notes.append(f"No verdict on speed, the machine was {noise.text}.")
        for name, model in timed.items():
            linear, conversion = timings[name, "linear"], conversions[name]
            conversion.seconds, conversion.seconds_spread = linear.seconds, linear.spread
            conversion.speedup = timings[name, "softmax"].seconds / linear.seconds
            conversion.tokens = model.longest
    measured = list(conversions.values())
    verdicts, differences = _verdicts(measured, paired=not other, noisy=noisy)
    return Compared(inputs, measured, list(dict.fromkeys(notes)), noisy, verdicts, differences)


def _names(options: CompareOptions) -> Sequence[str]:
    """Return the checkpoints' names: those of their folders, unless two are alike.

    Raises:
        ConfigError: for fewer than two checkpoints, or one that is given twice.
    """
    given = options.checkpoints
    if len(given) < 2:
        raise ConfigError(f"compare: got {len(given)} checkpoint, expected two or more; name another one")
    if (twice := repeated(map(user_path, given))) is not None:
        raise ConfigError(f"compare: got {str(twice)!r} twice, expected different checkpoints; leave one of them out")
    folders = [Path(name_of(checkpoint)).name for checkpoint in given]
    return folders if len(set(folders)) == len(folders) else given


def _of_one_length(options: CompareOptions, names: Sequence[str], notes: list[str]) -> CompareOptions:
    """Return the options with inputs that all models take; add a note if one of them could take longer inputs."""
    from linearize.training.stage_two.load import length_limit

    takes = zip(names, map(length_limit, options.checkpoints), strict=True)
    limits = {name: limit for name, limit in takes if limit is not None}
    shortest, asked = min(limits, key=lambda name: limits[name], default=""), options.inputs.max_length or LENGTH
    if not shortest or limits[shortest] >= min(asked, max(limits.values())):
        return options
    text = f"Inputs were cut to {limits[shortest]:,} tokens, the most that {shortest} takes"
    notes.append(f"{text}, so that all models read the same inputs.")
    return replace(options, inputs=replace(options.inputs, max_length=limits[shortest]))


def _measure(name: str, loaded: Loaded, options: CompareOptions) -> tuple[Conversion, str, str, list[str]]:
    """Return a conversion without its time, the description of its inputs, the hash of their tokens, and notes."""
    # Without each checkpoint's provenance, hence with the default seed: the inputs are the same for all.
    measured = measure_checkpoint(loaded, options.inputs, options.original)
    notes = list(measured.notes)
    if measured.original is None:
        notes.append(f"no cosine to the original, as {measured.missing}; give it with --original.")
    if Provenance(loaded.model.config.linearize.get("provenance")).weights_were_trained:
        notes.append(OTHER_SOFTMAX)
    fidelity = measured.fidelity
    kernels = Counter(layer.kernel for layer in linear_attentions(loaded.model).values())
    figures: Values = {name: fidelity.mean(name) for name in FIDELITY_FIGURES}
    conversion = Conversion(
        name=name,
        kernels=", ".join(f"{count} x {kernel}" for kernel, count in kernels.items()),
        parameters_added=sum(p.numel() for p in kernel_parameters(loaded.model)),
        **figures,
        cosine=None if measured.outputs is None else measured.outputs.cosine,
        layers=[{key: value for key, value in asdict(layer).items() if key != "heads"} for layer in fidelity.layers],
        per_input=measure_each_input(loaded, measured),
    )
    # Padding may be on either side, and images of other sizes are the same images.
    tokens = [batch["input_ids"][batch["attention_mask"].bool()] for batch in measured.batches if "input_ids" in batch]
    return conversion, measured.inputs, data_digest(tokens), notes


def _verdicts(
    conversions: Sequence[Conversion], *, paired: bool, noisy: bool
) -> tuple[list[str], list[SideDifference]]:
    """Return, for each figure, a sentence that names the best conversion, and its differences from the others."""
    verdicts, differences = [], []
    for figure, label in FIGURES.items() if paired else ():
        values = {each.name: each.per_input[figure] for each in conversions if figure in each.per_input}
        if len(values) == len(conversions):
            verdict, by_figure = best_by(label, values, larger_is_better=figure == "cosine")
            verdicts.append(verdict)
            differences += by_figure
    times = {
        each.name: (each.seconds, each.seconds_spread)
        for each in conversions
        if each.seconds is not None and each.seconds_spread is not None
    }
    if not noisy and len(times) == len(conversions) and len({each.tokens for each in conversions}) == 1:
        verdicts.append(fastest(times))
    return verdicts, differences


def write_comparison(
    options: CompareOptions, target: str, *, overwrite: bool = False, on_event: Callback = ignore
) -> Compared:
    """Compare several conversions and write the numbers to a folder; on an error nothing is written.

    Raises:
        CheckpointError: if the folder cannot be used or written.
        LinearizeError: as `compare_checkpoints` does.
    """
    sources = [*options.checkpoints, options.original, options.inputs.dataset]
    with claim(target, overwrite=overwrite, sources=sources):
        compared = compare_checkpoints(options, on_event)
        with atomic_folder(target, overwrite=overwrite) as folder:
            (folder / NUMBERS).write_text(json.dumps(finite(asdict(compared)), indent=2) + "\n", encoding="utf-8")
    return compared
