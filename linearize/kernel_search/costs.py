"""What a candidate costs: time and memory of one attention at one length, measured here beside softmax, and remembered.

Softmax and all candidates of one size are timed in turns (`linearize.bench.timing`), so that what else the machine does
falls on all of them alike; a cost is the share of softmax's time in the same turns. Figures lie in the user's cache
folder, by machine, versions, sizes and arguments, so that a second search has the same ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from linearize import __version__
from linearize.attention.backends.fla import chunk_kernel
from linearize.attention.shape import HeadShape
from linearize.bench.attention import AttentionSizes, AttentionSuite
from linearize.bench.machine import DTYPES, NoiseWatch, processor_name
from linearize.bench.measure import memory_of
from linearize.bench.timing import Call, in_turns, seconds_of
from linearize.events import Callback, Started
from linearize.modeling.plan import SOFTMAX, LayerPlan
from linearize.native import engine
from linearize.native.locate import cache_folder
from linearize.parsing import read_json
from linearize.registry import kernel_info, make_config

FILE = "attention-costs.json"
AIM, LEAST, MOST = 5.0, 5, 50
"""So many seconds for all turns of a measurement together, but at least and at most so many turns."""


@dataclass(frozen=True)
class Cost:
    """What one attention takes.

    Attributes:
        share: of softmax's time in the same turns.
        seconds: time of the fastest turn.
        softmax_seconds: softmax's.
        bytes: peak memory; None where it was not measured.
        softmax_bytes: softmax's.
        noisy: whether the machine was too noisy meanwhile to be trusted.
    """

    share: float
    seconds: float
    softmax_seconds: float
    bytes: int | None = None
    softmax_bytes: int | None = None
    noisy: bool = False


@dataclass(frozen=True)
class Where:
    """What is measured where.

    Attributes:
        length: tokens.
        device: where it runs.
        dtype: of the inputs, as `linearize.bench.machine.DTYPES` names it.
        memory: whether peak memory is measured too.
        remeasure: whether what is known is measured anew.
    """

    length: int
    device: str
    dtype: str
    memory: bool = True
    remeasure: bool = False


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type of numbers that can be measured; of others fp32's."""
    return next((name for name, known in DTYPES.items() if known == dtype), "float32")


def measure_costs(
    shape: HeadShape, plans: Mapping[str, LayerPlan], where: Where, on_event: Callback
) -> dict[str, Cost]:
    """Return the cost of every candidate in an attention of one size, from the cache where it is known.

    Args:
        shape: its sizes.
        plans: what each candidate is there, by label.
        where: length, device and type.
        on_event: called with what is being measured.
    """
    known = _read()
    keys = {label: _key(shape, plan, where) for label, plan in plans.items()}
    missing = [x for x in plans if where.remeasure or not _complete(known.get(keys[x]), where)]
    if missing:
        for label, cost in _measure(shape, {label: plans[label] for label in missing}, where, on_event).items():
            known[keys[label]] = cost
        _write({key: known[key] for key in keys.values()})
    return {label: known[key] for label, key in keys.items()}


def _complete(cost: Cost | None, where: Where) -> bool:
    """Whether a known cost has all that is asked for; on some devices memory is never measured."""
    measured = where.memory and (where.device == "cpu" or where.device.startswith("cuda"))
    return cost is not None and (cost.bytes is not None or not measured)


def _measure(shape: HeadShape, plans: Mapping[str, LayerPlan], where: Where, on_event: Callback) -> dict[str, Cost]:
    """Time softmax and candidates in turns, and measure the memory of each."""
    suites = {label: suite_of(shape, plan, where) for label, plan in plans.items()}
    first = next(iter(suites.values()))
    watch = NoiseWatch(where.device)
    watch.probe()
    bytes_of: dict[str, int | None] = dict.fromkeys([SOFTMAX, *suites])
    if where.memory:
        for label, suite in [(SOFTMAX, first), *suites.items()]:
            on_event(Started(f"measuring the memory of {label} at {where.length:,} tokens"))
            variant = "softmax" if label == SOFTMAX else "linear"
            bytes_of[label] = memory_of(suite, variant, where.length).bytes
    on_event(Started(f"timing softmax and {len(plans)} candidates at {where.length:,} tokens"))
    calls: dict[str, Call] = {SOFTMAX: first.prepare("softmax", where.length)}
    calls |= {label: suite.prepare("linear", where.length) for label, suite in suites.items()}
    warm_up = sum(seconds_of(call) for call in calls.values())
    turns = max(LEAST, min(MOST, int(AIM / max(warm_up, 1e-9))))
    # The fastest turn: what else the machine does makes a call slower, never faster.
    times = {name: min(taken) for name, taken in in_turns(calls, turns, warm_up=warm_up).items()}
    calls.clear()
    gc.collect()
    noise, softmax = watch.stop(), times[SOFTMAX]
    return {
        label: Cost(
            times[label] / softmax,
            times[label],
            softmax,
            bytes_of[label],
            bytes_of[SOFTMAX],
            noise.too_noisy,
        )
        for label in plans
    }


def suite_of(shape: HeadShape, plan: LayerPlan, where: Where) -> AttentionSuite:
    """Return the measurement of one attention in one layer's sizes."""
    sizes = AttentionSizes(
        plan.kernel,
        plan.arguments,
        plan.hybrid,
        shape.heads,
        shape.head_dim,
        dtype=where.dtype,
        device=where.device,
        key_heads=shape.key_heads,
        value_dim=shape.value_dim,
    )
    return AttentionSuite(sizes, causal=shape.causal)


def _key(shape: HeadShape, plan: LayerPlan, where: Where) -> str:
    """Name a measurement by all that it depends on."""
    cpu = where.device == "cpu"
    facts = {
        "versions": [__version__, torch.__version__],
        "machine": processor_name() if cpu else torch.cuda.get_device_name(where.device) if _cuda(where) else "",
        "device": where.device,
        "threads": torch.get_num_threads() if cpu else None,
        "native": cpu and engine() is not None,
        "fla": chunk_kernel(torch.device(where.device)) is not None,
        "dtype": where.dtype,
        "tokens": where.length,
        "shape": asdict(shape),
        "kernel": plan.kernel,
        "config": asdict(make_config(kernel_info(plan.kernel), plan.arguments)),
        "window": plan.hybrid.window,
        **plan.hybrid.changed,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _cuda(where: Where) -> bool:
    return where.device.startswith("cuda")


def _read() -> dict[str, Cost]:
    """Return what is known; a file that is damaged, or of another version, counts as none."""
    file = _file()
    if file is None:
        return {}
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        return {key: cost for key, values in read_json(file).items() if (cost := cost_of(values))}
    return {}


def cost_of(values: Mapping[str, Any]) -> Cost | None:
    """Return a cost from plain data; None where it is none."""
    names = {field.name for field in dataclasses.fields(Cost)}
    numbers = [values.get(name) for name in ("share", "seconds", "softmax_seconds")]
    counts = [values.get(name) for name in ("bytes", "softmax_bytes")]
    right = all(isinstance(n, float) and math.isfinite(n) and n > 0 for n in numbers)
    right = right and all(n is None or (type(n) is int and n >= 0) for n in counts)
    return Cost(**values) if right and set(values) <= names else None


def _write(costs: Mapping[str, Cost]) -> None:
    """Add costs to the file, written beside and renamed; where that cannot be done they are measured again."""
    file = _file()
    if file is None:
        return
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        entries = {key: asdict(cost) for key, cost in {**_read(), **costs}.items()}
        beside.write_text(json.dumps(entries, indent=0))
        beside.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()


def _file() -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / FILE
