"""Long documents from end to end: is a linear model that reads whole documents better than the original, which cannot?

The original is tuned at its own length; its conversion gets more positions and is tuned on whole documents with the
same options. Both are measured on the same rows; the original also in chunks, as is common today.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from linearize.checkpoint.fingerprint import MODEL, UNKNOWN_INPUTS, fingerprint, model_digest
from linearize.checkpoint.loading import check_device, load_processor, model_type
from linearize.checkpoint.output import atomic_folder, claim
from linearize.checkpoint.ownership import remove_parts
from linearize.conversion.positions import extend_positions
from linearize.core.errors import CheckpointError, ConfigError, interrupted_run
from linearize.core.options import name_of, recorded
from linearize.core.parsing import finite
from linearize.jobs import evaluate
from linearize.jobs.config import AlignJob, ConvertJob
from linearize.jobs.convert import align_checkpoint, check_kernel, convert_checkpoint, make_plan
from linearize.jobs.evaluate import SideDifference, SideResult, Times
from linearize.jobs.events import Callback, Noted, Saved, Started, ignore
from linearize.jobs.finetune import finetune_checkpoint
from linearize.jobs.task_config import LongdocJob, TuneJob
from linearize.training.processes import check_alone
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.load import NO_LIMIT, length_limit
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.save import STARTED, check_started, remove_work, without_folders, write_started
from linearize.training.stage_two.splits import located, open_splits
from linearize.training.stage_two.task_types.base import TaskData
from linearize.training.states import StateFolder

RESULTS, TIMES = "results.json", "times.json"
"""Output files: the scores, which a seed determines; and the times, which depend on the machine."""
STEPS = 5
ORIGINAL, CONVERTED, ALIGNED, LINEAR = "original", "converted", "aligned", "linear"
"""The steps' folders in the work folder: the tuned original; the converted, the aligned and the tuned model."""
_STEP = f"({ORIGINAL}|{CONVERTED}|{ALIGNED}|{LINEAR})"
PARTS = rf"\.?started\.json|{_STEP}(\.training|\.stage1|\.align)?|\.(new|old|lock)-{_STEP}.*"
FREE = ("save_every", "memory")
"""Options that a resumed run may change."""


@dataclass(frozen=True)
class LongdocResult:
    """Result of `linearize longdoc`.

    Attributes:
        output: the folder, with the tuned original, the tuned linear model, and these results.
        task: name of the task.
        data: one line about the data.
        rows: number of measured rows.
        longest_row: tokens of the longest row.
        sides: the original with truncated rows, the original in chunks (if rows are longer and the task reads one
            text), the linear model with the same truncated rows, and the linear model at full length.
        differences: the linear model at full length minus each other side, on the same rows.
        chance: the score of the best answer that ignores the input.
        notes: caveats for the reader.
        verdict: the conclusion in one or two sentences.
        times: time and memory of each side.
        seconds: total duration; after a resume, the duration since then.
    """

    output: str
    task: str
    data: str
    rows: int
    longest_row: int
    sides: tuple[SideResult, ...]
    differences: tuple[SideDifference, ...]
    chance: float | None
    notes: tuple[str, ...]
    verdict: str
    times: Times
    seconds: float = 0.0


def run_longdoc(job: LongdocJob, on_event: Callback = ignore) -> LongdocResult:
    """Tune a model, convert it for long documents, tune the conversion with the same options, and compare both.

    The output is written as a whole or not at all. Finished steps are kept in `<output>.work` until then. With
    `resume`, an interrupted run continues there, from its last state.

    Args:
        job: the options.
        on_event: called with every event.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct.
    """
    start = time.perf_counter()
    check_alone("longdoc")
    target = job.target()
    work = work_folder(target)
    with claim(target, overwrite=job.overwrite, sources=job.sources()):
        device = check_device(job.device)
        check_options(job)
        if work.exists() and not job.resume and not job.overwrite:
            raise interrupted_run(work)
        data, lengths = examine(job)
        for note in lengths.notes:
            on_event(Noted(note))
        begin(job, work, data, on_event)
        for number, (folder, title, run, step) in enumerate(steps(job, work, lengths), start=1):
            if not (work / folder).exists() and (job.align_steps or folder != ALIGNED):
                on_event(Started(f"step {number} of {STEPS}: {title}"))
                run(step, on_event)
        result = compare(job, work, data, lengths, device, on_event)
        result = replace(result, seconds=time.perf_counter() - start)
        # Both models and the results become one folder.
        values = {**asdict(result), "output": target.name, "options": {"task": job.task.name, **recorded(job)}}
        timed = {name: values.pop(name) for name in ("times", "seconds")}
        with atomic_folder(target, overwrite=job.overwrite) as fresh:
            for name in (ORIGINAL, LINEAR):
                shutil.copytree(work / name, fresh / name)
            for file, content in ((RESULTS, values), (TIMES, timed)):
                (fresh / file).write_text(json.dumps(finite(content), indent=2) + "\n", encoding="utf-8")
        with contextlib.suppress(CheckpointError, OSError):
            remove(job, work)
    on_event(Saved(target))
    return result


def steps(job: LongdocJob, work: Path, lengths: Lengths) -> list[tuple[str, str, Callable[..., object], object]]:
    """Return the steps that precede the comparison, in order: the folder, the title, the function, and its job."""
    short, long = lengths.original, lengths.linear
    distilled_at, aligned_at = min(job.distill_length or short, long), min(job.align_length or long, long)
    file, columns, texts = write_texts(job, work)
    shared = {
        "dataset": str(file),
        "text_column": columns,
        "holdout": max(1, min(32, texts // 10)),
        "seed": job.seed,
        "device": job.device,
        "save_every": job.save_every,
        "resume": True,
    }
    conversion = ConvertJob.of(
        model=job.model,
        **job.attention(),
        max_length=long if long > short else None,
        positions=job.positions,
        distill_steps=job.distill_steps,
        distill_length=distilled_at,
        query_sample=None,
        packing=False,
        align_steps=0,
        batch_size=evaluate.rows_of_tokens(job.batch_tokens, min(distilled_at, lengths.longest)),
        output=str(work / CONVERTED),
        **shared,
    )
    alignment = AlignJob.of(
        model=str(work / CONVERTED),
        length=aligned_at,
        steps=job.align_steps,
        batch_size=evaluate.rows_of_tokens(job.batch_tokens, min(aligned_at, lengths.longest)),
        output=str(work / ALIGNED),
        **shared,
    )
    original = tuning_job(job, job.model, work / ORIGINAL, short)
    linear = tuning_job(job, str(work / (ALIGNED if job.align_steps else CONVERTED)), work / LINEAR, long)
    converting = f"conversion for {long:,} tokens, stage one on rows of {distilled_at:,}"
    return [
        (ORIGINAL, f"tuning the original at {short:,} tokens", finetune_checkpoint, original),
        (CONVERTED, converting, convert_checkpoint, conversion),
        (ALIGNED, f"alignment on rows of up to {aligned_at:,} tokens", align_checkpoint, alignment),
        (LINEAR, f"tuning the linear model at {long:,} tokens", finetune_checkpoint, linear),
    ]


def tuning_job(job: LongdocJob, model: str, target: Path, length: int) -> TuneJob:
    """Return the fine-tuning job of a model on rows of `length` tokens, with the options that both models share."""
    return TuneJob(
        model,
        job.task,
        job.dataset,
        str(target),
        resume=True,
        new_head=True,
        device=job.device,
        data=replace(job.rows, max_length=length, seed=job.seed),
        tune=replace(in_batches(job.tune, length, job.batch_tokens), seed=job.seed, save_every=job.save_every),
    )


def in_batches(tune: TuneConfig, length: int, batch_tokens: int) -> TuneConfig:
    """Return the options with the same rows per optimizer step, in batches of at most `batch_tokens` tokens."""
    most = max(1, min(tune.batch_size, batch_tokens // length))
    rows = max(rows for rows in range(1, most + 1) if tune.batch_size % rows == 0)
    return replace(tune, batch_size=rows, gradient_accumulation=tune.batch_size // rows, eval_batch_size=rows)


def compare(
    job: LongdocJob, work: Path, data: TaskData, lengths: Lengths, device: str, on_event: Callback
) -> LongdocResult:
    """Measure all sides on the same rows."""
    on_event(Started(f"step 5 of {STEPS}: comparison"))
    sides = evaluate.Sides(job.task, job.dataset, device, on_event, memory=job.memory)
    short = replace(job.rows, max_length=lengths.original, seed=job.seed)
    original, linear = str(work / ORIGINAL), str(work / LINEAR)
    sides.measure(f"original at {lengths.original:,}", original, short)
    notes = list(lengths.notes)
    pieces = evaluate.chunk_options(original, short, job.chunk_length)
    reason = evaluate.why_no_chunks(data, pieces.max_length)
    if reason is None:
        sides.measure(f"original, chunks of {pieces.max_length:,} averaged", original, pieces)
    elif lengths.longest > lengths.original:
        notes.append(reason)
    if lengths.linear > lengths.original:
        sides.measure(f"linear at {lengths.original:,}", linear, short)
    full = sides.measure(f"linear at {lengths.linear:,}", linear, replace(short, max_length=lengths.linear))
    differences = sides.differences(full)
    # The folders' names, without where they are on this machine.
    results = tuple(replace(side.result, model=Path(side.result.model).name) for side in sides.read)
    chance, rows = full.measured.chance, full.measured.rows
    return LongdocResult(
        str(job.target()),
        job.task.name,
        without_folders(data.description),
        rows,
        lengths.longest,
        results,
        differences,
        chance,
        tuple(notes),
        ("Only a quick look: " if job.quick else "") + verdict(job, results, differences, lengths, rows, chance),
        sides.times(),
    )


def verdict(
    job: LongdocJob,
    sides: tuple[SideResult, ...],
    differences: tuple[SideDifference, ...],
    lengths: Lengths,
    rows: int,
    chance: float | None,
) -> str:
    """Return one or two sentences on whether the linear model at full length is worth it.

    If nothing was learned, that is the verdict: guesses cannot be ranked.
    """
    failed = [side.name for side in sides if not side.learned]
    if failed and not (sides[0].learned or sides[-1].learned):
        whom = "no side is" if len(failed) == len(sides) else f"{', '.join(failed)}: not"
        level = "" if chance is None else f" ({job.task.written(chance)})"
        # Sides that always give the same answer never differ, so the spread of two independent guesses counts too.
        guesses = [(2**0.5 * low, 2**0.5 * high) for low, high in (side.interval for side in sides if side.interval)]
        more = f"Give more steps or rows; {_finest(job, [one.interval for one in differences] + guesses, rows)}"
        return f"Nothing was learned: {whom} above chance{level}. {more}"
    if lengths.longest <= lengths.original:
        return (
            f"No row is longer than the {lengths.original:,} tokens that the original reads, so this data cannot show "
            "whether longer inputs help."
        )
    warning = f" Not above chance: {', '.join(failed)}." if failed else ""
    cut, by_cut = _gain(job, differences, sides[0].name)
    chunks, by_chunks = _gain(job, differences, sides[1].name) if sides[1].chunks else (None, "")
    words = {1: "better than", 0: "within the noise of", -1: "worse than"}
    full = f"Read at {lengths.linear:,} tokens, the linear model"
    whole = f"the original cut at {lengths.original:,}"
    if cut <= 0:
        text = f"No gain is shown: {full[0].lower()}{full[1:]} is {words[cut]} {whole}{by_cut}"
        text += f", and worse than its chunks{by_chunks}" if chunks == -1 else ""
        text += f"; {_finest(job, [one.interval for one in differences], rows)}" if cut == 0 else "."
    elif chunks is None:
        text = f"Longer inputs help: {full[0].lower()}{full[1:]} is better than {whole}{by_cut}."
    else:
        text = f"{full} is better than {whole}{by_cut}, and {words[chunks]} its averaged chunks{by_chunks}."
    return text + warning


def _finest(job: LongdocJob, intervals: list[tuple[float, float]], rows: int) -> str:
    """Return a sentence on the smallest difference that the rows can show: half the widest interval."""
    widest = max(((high - low) / 2 for low, high in intervals), default=0.0)
    size = f"{100 * widest:.0f} points" if job.task.percent else f"{widest:.2f}"
    return f"{rows:,} rows cannot show differences below about {size}."


def _gain(job: LongdocJob, differences: tuple[SideDifference, ...], minus: str) -> tuple[int, str]:
    """Return 1 for a gain, -1 for a loss, 0 for noise; and by which metric, if accuracy and macro-F1 differ."""
    by_metric: dict[str, int] = {}
    for difference in differences:
        if difference.minus == minus:
            gains = (difference.value < 0) == job.task.lower_is_better
            by_metric[difference.by] = 0 if difference.within_noise else 1 if gains else -1
    signs = set(by_metric.values())
    if len(signs) <= 1:
        return sum(signs), ""
    words = {1: "better", 0: "within the noise", -1: "worse"}
    # If one metric is within the noise, the other decides; if they contradict each other, the result is noise.
    return sum(signs), f" (by {' and '.join(f'{name}: {words[sign]}' for name, sign in by_metric.items())})"


@dataclass(frozen=True)
class Lengths:
    """Lengths of the inputs in tokens.

    Attributes:
        original: the most tokens the original can read.
        linear: the most tokens the linear model can read.
        longest: length of the longest row to measure on.
        notes: caveats for the reader.
    """

    original: int
    linear: int
    longest: int
    notes: tuple[str, ...] = ()


def check_options(job: LongdocJob) -> None:
    """Check early for the errors of later steps: a converted model, an unknown kernel, positions that do not extend.

    Raises:
        LinearizeError: a subclass of it, if a later step would fail.
    """
    if model_type(job.model) == "linearize":
        raise ConfigError(f"model: {job.model!r} is already converted; give the original that it was made from")
    longer = None if length_limit(job.model) in (None, job.max_length) else job.max_length
    convert = ConvertJob.of(model=job.model, **job.attention(), max_length=longer)
    check_kernel(convert)
    loaded, _, _ = make_plan(convert)
    if convert.max_length is not None:
        extend_positions(loaded.model, convert.max_length, method=job.positions)


def examine(job: LongdocJob) -> tuple[TaskData, Lengths]:
    """Open the data with whole rows, and determine the lengths of rows and models.

    Raises:
        ConfigError: if rows are longer than the model takes and `max_length` is not given, the original has no limit,
            or chunks would be longer than it takes.
        DataError: if the data cannot be read, or a text has no token.
    """
    limit = length_limit(job.model)
    if limit is None:
        raise ConfigError(
            f"model: {job.model!r} has no input limit, expected a model that truncates its inputs; compare at other "
            "lengths: linearize evaluate MODEL --compare ORIGINAL --max-length N"
        )
    options = replace(job.rows, max_length=job.max_length or NO_LIMIT, seed=job.seed)
    evaluate.chunk_options(job.model, options, job.chunk_length)
    data = prepare(job.task, load_processor(job.model, "text"), options, data=job.dataset, head_of=job.model)
    longest = data.facts["longest_row"]
    if job.max_length is None and longest > limit:
        power = 1 << (longest - 1).bit_length()
        raise ConfigError(
            f"max_length: got none, but rows have up to {longest:,} tokens and {job.model!r} takes {limit:,}; say how "
            f"long inputs should be, such as --max-length {power}"
        )
    notes = []
    if job.quick:
        notes.append(
            f"A quick look, not a measurement: {data.facts['rows']:,} rows to measure on, {len(data.train):,} to train "
            f"on, {job.distill_steps} steps of stage one and {job.align_steps} of alignment. Leave --quick out for a "
            "real result."
        )
    if longest <= limit:
        notes.append(
            f"The longest row has {longest:,} tokens, which the original reads whole ({limit:,}): a longer input "
            "makes no difference here."
        )
    if job.max_length is not None and longest > job.max_length:
        notes.append(
            f"{100 * data.facts['cut_share']:.1f} % of the rows are longer than {job.max_length:,} tokens and are cut "
            f"there; the longest has {longest:,}."
        )
    return data, Lengths(limit, job.max_length or limit, longest, tuple(notes))


def write_texts(job: LongdocJob, work: Path) -> tuple[Path, str, int]:
    """Write the texts of the training rows, which exclude all texts to measure on.

    Returns:
        The file, its columns in the format of `DataConfig.text_column`, and the number of texts.
    """
    options = DataOptions(limit=job.rows.limit, seed=job.seed)
    train = open_splits(job.task, located(job.task, job.dataset), options).train
    examples = train.fetch(range(len(train)))
    pairs = examples[0].pair is not None
    file = _texts_file(job, work)
    rows = [{"text": e.value, **({"pair": str(e.pair)} if pairs else {})} for e in examples]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file, "text,pair" if pairs else "text", len(rows)


def _texts_file(job: LongdocJob, work: Path) -> Path:
    return work / f"{Path(name_of(job.dataset)).name.partition('.')[0]}.jsonl"


def work_folder(target: Path) -> Path:
    """Return the work folder of an output."""
    return target.with_name(f"{target.name}.work")


def begin(job: LongdocJob, work: Path, data: TaskData, on_event: Callback) -> None:
    """Create the work folder, or resume the run in it.

    Raises:
        ConfigError: if the run was started with another model, other options or other data.
        CheckpointError: if the folder holds something else.
    """
    options = {name: value for name, value in recorded(job).items() if name not in FREE}
    options |= {"task": job.task.name, "label column": job.task.label}
    started = fingerprint(data=data, options=options) | {MODEL: model_digest(job.model)}
    if job.resume and (work / STARTED).exists():
        if check_started(work, started, newer=[MODEL]):
            on_event(Noted(UNKNOWN_INPUTS))
        return
    remove(job, work)
    write_started(work, started)


def remove(job: LongdocJob, work: Path) -> None:
    """Remove the work folder of a run that is saved or starts again.

    Raises:
        CheckpointError: if it holds something else; nothing is removed then.
    """
    parts = re.compile(rf"{PARTS}|{re.escape(_texts_file(job, work).name)}")
    remove_parts(work, parts, "a longdoc run of linearize", record=STARTED, unmarked=_holds_states)


def _holds_states(folder: Path) -> bool:
    """Tell whether a folder holds the states of an unfinished step, and nothing else."""
    try:
        if folder.suffix == ".training":
            remove_work(folder, check_only=True)
        else:
            StateFolder(folder, 1).check_free(overwrite=True)
    except CheckpointError:
        return False
    return bool(folder.suffix)
