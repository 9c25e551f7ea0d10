"""A job as the command line that does it: what was given, without the defaults."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from linearize.options import Option, options_of, value_of, without_folder

if TYPE_CHECKING:
    from linearize.finetune.task import Task

AGAIN = ("resume", "overwrite")
"""Options that say something of one run, not of the job."""
OF_THE_PLACE = ("output", "device", "report_to")
"""Options that say where it is done."""


def command_of(
    verb: str,
    job: object,
    changes: Mapping[str, object] | None = None,
    *,
    leave_out: Collection[str] = (),
    travels: bool = False,
) -> str:
    """Return the command line of a job: the options that differ from their defaults.

    Args:
        verb: the verb, such as "convert".
        job: the job's config.
        changes: options with other values, by name.
        leave_out: options that are left out.
        travels: whether the line is to be read elsewhere: what lies on this disk is named without its folder, and the
            output and the device are left out.
    """
    out = {*leave_out, *AGAIN, *(OF_THE_PLACE if travels else ())}
    given = {name: value for name, value in given_options(job).items() if name not in out}
    if travels:
        given = {name: without_folder(value) for name, value in given.items()}
    return line(verb, type(job), given | dict(changes or {}))


def line(verb: str, config: type, given: Mapping[str, object]) -> str:
    """Return a command line.

    Args:
        verb: the verb.
        config: the config of its job.
        given: options by name; those that are None are left out.
    """
    words = ["linearize", verb]
    known = options_of(config)
    for name in sorted(given, key=lambda name: not known[name].metadata.get("positional", False)):
        words += [] if given[name] is None else _words(known[name], given[name])
    return shlex.join(words)


def data_options(job: object) -> dict[str, object]:
    """Return what a job was told of its data, for a job that goes on with the same."""
    known = options_of(type(job))
    return {
        name: value
        for name, value in given_options(job).items()
        if known[name].places[0][0] == "data" or name in ("device", "seed")
    }


def given_options(job: object) -> dict[str, object]:
    """Return the options of a job that differ from what they would be if nobody had said anything."""
    found: dict[str, object] = {}
    for name, one in options_of(type(job)).items():
        place, inner = one.places[0]
        owner = getattr(job, place) if place else job
        if place != "task" and hasattr(owner, inner):
            value = value_of(owner, inner, one.metadata)
            if one.required or (value != one.default and value not in (None, (), {})):
                found[name] = value
    data, task = getattr(job, "data", None), getattr(job, "task", None)
    if data is not None and task is not None and hasattr(task, "type"):
        # What the length would be otherwise is written in a checkpoint, which may be another one by now.
        return found | task_options(task) | {"max_length": data.max_length}
    derive: Callable[[Mapping[str, object]], Any] = getattr(type(job), "derive", lambda values: {})
    for name in list(found):
        place, inner = options_of(type(job))[name].places[0]
        others = {key: value for key, value in found.items() if key != name}
        if "model" in others and derive(others).get(place, {}).get(inner) == found[name]:
            del found[name]
    return found


def task_options(task: Task) -> dict[str, object]:
    """Return a task as options of the verbs that take one: its name, and what differs from the task of that name."""
    from linearize.finetune.tasks import TASKS

    usual = TASKS[task.name]
    found: dict[str, object] = {"task": task.name}
    for option, name in (("columns", "columns"), ("label_column", "label"), ("labels", "labels")):
        if getattr(task, name) != getattr(usual, name):
            found[option] = getattr(task, name)
    return found | ({"split": task.validation[0]} if task.exact_validation else {})


def _words(one: Option, value: Any) -> list[str]:
    """Return an option with its value as words."""
    if one.metadata.get("positional"):
        return [str(value)]
    flag = f"--{one.name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"] if value is not one.default else []
    if one.metadata.get("repeat"):
        return [word for key, its in value.items() for word in (flag, f"{key}={_text(its)}")]
    return [flag, _text(value)]


def _text(value: object) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return ",".join(f"{key}={_text(its)}" for key, its in value.items() if its is not None)
    if isinstance(value, tuple | list):
        pairs = [one for one in value if isinstance(one, tuple)]
        return ",".join([f"{key}={_text(its)}" for key, its in pairs] if pairs else map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
