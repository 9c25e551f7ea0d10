"""How a checkpoint was made: the record `provenance` in its config.json, with the command lines, and `log.jsonl`.

The record comes from whoever made the checkpoint. Reading it never fails: a value of the wrong type counts as missing.

The log has every stage step by step, one JSON object per line. Every line has `stage` ("distillation", "alignment" or
"finetuning") and `step`. Lines of the first two also have `steps`, `losses` (by module), `held_out`, `learning_rate`
and `seconds`; stage two's are the entries of transformers' Trainer (`loss`, `eval_loss`, `eval_score` ...).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from linearize.checkpoint.ownership import check_links
from linearize.core.errors import CheckpointError
from linearize.core.options import name_of
from linearize.core.parsing import parse_json, read_text
from linearize.core.registry import ReadOnlyValues, Values, fits

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SWITCHES = ("--resume", "--overwrite", "--json")
"""Options without a value that concern a single run, not the job."""
PLACES = ("--output", "--device", "--report-to")
"""Options with a value that determine where a job runs and writes."""
LOG = "log.jsonl"
STAGE_ONE, ALIGNMENT, STAGE_TWO = "distillation", "alignment", "finetuning"
Entry: TypeAlias = "DataclassInstance | Mapping[str, object]"
"""A report of a step, or a line that is already plain data."""


class Record:
    """A mapping of unknown origin; false if it is empty.

    Args:
        values: the mapping; anything else counts as an empty one.
    """

    def __init__(self, values: object = None) -> None:
        self.values: ReadOnlyValues = values if isinstance(values, Mapping) else {}

    def __bool__(self) -> bool:
        return bool(self.values)

    def part(self, name: str) -> Record:
        """Return a nested mapping."""
        return Record(self.values.get(name))

    def parts(self, name: str) -> list[Record]:
        """Return the mappings in a nested list."""
        return [Record(value) for value in self._list(name) if isinstance(value, Mapping)]

    def text(self, name: str) -> str | None:
        """Return a string."""
        value = self.values.get(name)
        return value if isinstance(value, str) else None

    def texts(self, name: str) -> list[str]:
        """Return the strings in a list."""
        return [value for value in self._list(name) if isinstance(value, str)]

    def whole(self, name: str) -> int | None:
        """Return a whole number."""
        value = self.values.get(name)
        return value if type(value) is int else None

    def number(self, name: str) -> float | None:
        """Return a finite number."""
        return _number(self.values.get(name))

    def numbers(self, name: str) -> dict[str, float]:
        """Return the finite numbers in a nested mapping."""
        found = {str(key): _number(value) for key, value in self.part(name).values.items()}
        return {key: value for key, value in found.items() if value is not None}

    def interval(self, name: str) -> tuple[float, float] | None:
        """Return a list of two finite numbers."""
        numbers = [number for number in map(_number, self._list(name)) if number is not None]
        return (numbers[0], numbers[1]) if len(numbers) == len(self._list(name)) == 2 else None

    def is_true(self, name: str) -> bool:
        """Tell whether a value is true."""
        return self.values.get(name) is True

    def _list(self, name: str) -> list[object]:
        value = self.values.get(name)
        return list(value) if isinstance(value, (list, tuple)) else []


def _number(value: object) -> float | None:
    return float(value) if fits(value, float) else None


class Provenance(Record):
    """How a checkpoint was made, such as `config.linearize.get("provenance")`.

    Its keys are `base_model` and `base_is_local` (whether that was a folder), `dataset` (the data of stage one; missing
    for the built-in data), `seed`, `longest_row` (in tokens, of stage one and the alignment), `commands` (those that
    made it, in order), `options` (of the conversion), a record of each stage (`distillation`, `alignment`,
    `finetuning`), `search`, `plan` (a file that chose the kernels) and `kernel_merit`
    (`linearize.fidelity.ablate.KernelMerit`).
    """

    @property
    def weights_were_trained(self) -> bool:
        """Whether the alignment or stage two trained the original's weights; if so, its softmax has changed."""
        return "finetuning" in self.values or self.part("alignment").text("train") not in (None, "kernels")

    @property
    def row_length(self) -> int | None:
        """Tokens of the longest row of the last stage; None if the record does not say."""
        task = self._task_row_length
        return _length(self.whole("longest_row")) if task is None else task

    @property
    def longest_row_length(self) -> int | None:
        """Tokens of the longest row of any stage; None if the record does not say."""
        lengths = (_length(self.whole("longest_row")), self._task_row_length)
        return max((length for length in lengths if length is not None), default=None)

    @property
    def _task_row_length(self) -> int | None:
        """Tokens of stage two's longest row, after it was cut."""
        tuned = self.part("finetuning")
        lengths = (_length(tuned.part("facts").number("longest_row")), _length(tuned.whole("max_length")))
        return min((length for length in lengths if length is not None), default=None)

    @property
    def search_sentence(self) -> str:
        """A sentence on the plan that a search chose and what it was asked for; empty if none chose the kernels."""
        search = self.part("search")
        plans = [point for point in search.parts("points") if (point.text("name") or "").startswith("the plan")]
        limit, length, kept = search.number("limit"), search.whole("length"), search.part("budget").number("softmax")
        if limit is None or length is None or not plans:
            return ""
        text = f"A search chose the kernel of every layer within {limit:.3g} times softmax's time at {length:,} tokens"
        text += f", where {int(kept)} may stay softmax" if kept else ""
        error, share = (plans[0].number(name) or 0.0 for name in ("error", "share"))
        measured = f"{search.text('figure')}, of the whole model on held-out data, before it was trained further"
        return f"{text}: {plans[0].text('kernels')}, at {share:.3g} of that time, with error {error:.4g} ({measured})"

    @property
    def reasons(self) -> dict[int, str]:
        """Why each layer has its kernel, by its number: from the search, else from the plan file."""
        why = self.part("plan").part("why")
        numbers = [number for number in map(str, why.values) if number.isdecimal() and len(number) < 10]
        reasons = {int(number): why.text(number) for number in numbers}
        for choice in self.part("search").parts("layers"):
            if (layer := choice.whole("layer")) is not None and choice.text("why"):
                reasons[layer] = choice.text("why")
        return {number: reason for number, reason in reasons.items() if reason}

    def choice_rows(self) -> list[tuple[str, str]]:
        """Return label and value of the plan that a search chose, and why each layer has its kernel."""
        rows = [("search, the plan", self.search_sentence)] if self.search_sentence else []
        return rows + [(f"why layer {number}", why) for number, why in sorted(self.reasons.items())]

    def training_rows(self) -> list[tuple[str, str]]:
        """Return label and value of each fact that the record has about training."""
        rows = []
        if search := self.part("search"):
            rows.append(("search", f"{search.whole('steps')} steps, {search.whole('plans_tried')} plans tried"))
        if stage := self.part("distillation"):
            data = self.text("dataset") or "the built-in data"
            ended = f"{stage.whole('steps')} steps on {data} ({stage.text('stopped')})"
            rows.append(("stage one", f"{ended}{_effort(stage)}"))
            for side in ("before", "after"):
                if mean := stage.part(side).numbers("mean"):
                    texts = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in mean.items()]
                    rows.append((f"fidelity {side}", ", ".join(texts)))
        if aligned := self.part("alignment"):
            teacher = aligned.text("teacher") or "its own softmax"
            what = f"{aligned.whole('steps')} steps with {teacher}, trained: {aligned.text('train')}"
            rows.append(("alignment", f"{what}{_effort(aligned)}"))
            for side in ("before", "after"):
                if error := aligned.part(side):
                    figures = {
                        "last hidden state, relative error": next(reversed(error.numbers("layers").values()), None),
                        "pooled cosine": error.number("cosine"),
                        "logits": error.number("logits"),
                    }
                    texts = [f"{name} {value:.4g}" for name, value in figures.items() if value is not None]
                    rows.append((f"whole model {side}", ", ".join(texts)))
        if tuned := self.part("finetuning"):
            what = f"{tuned.text('task')} on {tuned.text('data')}, {tuned.whole('steps')} steps"
            rows.append(("stage two", f"{what}{_effort(tuned)}"))
            rows += [(f"metric {name}", f"{value:.4g}") for name, value in tuned.numbers("metrics").items()]
            if (chance := tuned.number("chance")) is not None:
                rows.append(("chance", f"{chance:.4g}{'' if tuned.is_true('above_chance') else ', not above it'}"))
        return rows


def _effort(stage: Record) -> str:
    """Return the time of a stage and the machines that it ran on, as far as the record says."""
    seconds, hardware = stage.number("seconds"), stage.text("hardware")
    return ("" if seconds is None else f"; {seconds:,.0f} s") + (f" on {hardware}" if hardware else "")


def _length(tokens: float | None) -> int | None:
    return int(tokens) if tokens is not None and tokens > 0 else None


def without(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the words of a command line without some options and their values."""
    kept, skip = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in names:
            skip = not equals and name not in SWITCHES
        else:
            kept.append(word)
    return kept


def add_command(provenance: Values) -> dict[str, list[str]]:
    """Return the commands that made a checkpoint, including the running one.

    Checkpoints are shared, so local files are recorded without their folders, and the options in `PLACES` are left out.
    """
    earlier = provenance.get("commands")
    commands = list(earlier) if isinstance(earlier, list) else []
    # A caller in Python has no command line of ours.
    words = without(sys.argv[1:] if Path(sys.argv[0]).stem == "linearize" else [], (*SWITCHES, *PLACES))
    named = [name_of(x) if os.path.exists(x) else "".join(map(name_of, re.split("([,=])", x))) for x in words]
    command = shlex.join(["linearize", *named])
    # All stages of one `longdoc` have the same command line.
    return {"commands": commands if not words or commands[-1:] == [command] else [*commands, command]}


def log_file(stage: str, entries: Iterable[Entry], earlier: Iterable[Mapping[str, object]] = ()) -> dict[str, str]:
    """Return the log as a file of a checkpoint (for `save(..., extra_files=...)`); no file if there are no lines.

    Args:
        stage: the stage of the entries.
        entries: the lines without the stage, as mappings or dataclasses: the `history` of the stage's result.
        earlier: lines of the checkpoint that this one was made from. Those of the same stage are dropped, as the
            checkpoint's config also records only the last run of each stage.
    """
    lines = log_lines(stage, entries, earlier)
    return {LOG: "".join(json.dumps(line) + "\n" for line in lines)} if lines else {}


def log_lines(
    stage: str, entries: Iterable[Entry], earlier: Iterable[Mapping[str, object]] = ()
) -> list[Mapping[str, object]]:
    """Return the lines that `log_file` writes, for a further stage to pass as `earlier`."""
    lines = [entry for entry in earlier if entry["stage"] != stage]
    return lines + [
        {"stage": stage, **(dict(entry) if isinstance(entry, Mapping) else asdict(entry))} for entry in entries
    ]


def read_log(folder: str | Path) -> list[dict[str, object]]:
    """Read the log of a checkpoint in a folder; an empty list if it has no log.

    Raises:
        CheckpointError: if a line cannot be read, or a link leads out of the folder.
    """
    check_links(folder)
    file = Path(folder) / LOG
    if not file.is_file():
        return []
    try:
        lines = [parse_json(line) for line in read_text(file).splitlines() if line.strip()]
        if not all(isinstance(line, dict) and "stage" in line and "step" in line for line in lines):
            raise ValueError("a line without a stage or a step")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be read as a log ({error}); repair or remove it") from None
    return lines
