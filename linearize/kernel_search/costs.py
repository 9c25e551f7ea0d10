"""What a candidate costs: time and memory of one attention at one length, compared with softmax and remembered.

Softmax and all candidates of one size are timed in turns (`bench.meter`), so that other work on the machine
slows all of them alike; a cost is the share of softmax's time in the same turns. Costs are kept in the user's cache
folder, by machine, versions, sizes and arguments, so that a second search uses the same ones.
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
from typing import Any

import torch

from linearize import __version__
from linearize.attention.native.locate import cache_folder
from linearize.attention.shape import HeadShape
from linearize.core.events import Callback, Started
from linearize.core.parsing import read_json
from linearize.core.registry import kernel_info, make_config
from linearize.evaluation.bench.memory import memory_of
from linearize.evaluation.bench.meter import DTYPES, NoiseWatch, describe, in_turns
from linearize.evaluation.bench.suites import AttentionSizes, AttentionSuite
from linearize.kernel_search.candidates import Layout
from linearize.modeling.plan import SOFTMAX, LayerPlan

FILE = "attention-costs.json"
AIM, LEAST, MOST = 5.0, 5, 50
"""A measurement takes this many seconds for all turns together, with at least and at most this many turns."""


@dataclass(frozen=True)
class Cost:
    """What one attention takes.

    Attributes:
        share: of softmax's time in the same turns.
        seconds: time of the fastest turn.
        softmax_seconds: softmax's.
        bytes: peak memory; None if it was not measured.
        softmax_bytes: softmax's.
        noisy: whether the machine was too noisy to trust the figures.
    """

    share: float
    seconds: float
    softmax_seconds: float
    bytes: int | None = None
    softmax_bytes: int | None = None
    noisy: bool = False


@dataclass(frozen=True)
class Setting:
    """How costs are measured.

    Attributes:
        length: tokens.
        device: where the attention runs.
        dtype: type of the inputs; others than those of `bench.meter.DTYPES` are measured in fp32.
        memory: whether peak memory is measured too.
        remeasure: whether known costs are measured again.
    """

    length: int
    device: str
    dtype: torch.dtype = torch.float32
    memory: bool = True
    remeasure: bool = False

    @property
    def dtype_name(self) -> str:
        return next((name for name, known in DTYPES.items() if known == self.dtype), "float32")


Costs = Mapping[int, Mapping[str, Cost]]
"""Costs by layer number and label."""


def costs_of_layers(layout: Layout, setting: Setting, on_event: Callback) -> Costs:
    """Measure all candidates in all layers; layers that would have the same attentions are measured together, once."""
    groups: list[tuple[dict[str, LayerPlan], dict[str, Cost]]] = []
    costs = {}
    for number, layer in layout.layers.items():
        plans = {label: own[number] for label, own in layout.plans.items()}
        known = (found for others, found in groups if all(others[label].mixer == plans[label].mixer for label in plans))
        group = next(known, None)
        if group is None:
            group = measure_costs(layer.shape, plans, setting, on_event)
            groups.append((plans, group))
        costs[number] = group
    return costs


def measure_costs(
    shape: HeadShape, plans: Mapping[str, LayerPlan], setting: Setting, on_event: Callback
) -> dict[str, Cost]:
    """Return the cost of every candidate in an attention of one size, from the cache if it is known.

    Args:
        shape: its sizes.
        plans: each candidate's plan, by label.
        setting: length, device and type.
        on_event: called before each measurement.
    """
    known = _read()
    keys = {label: _key(shape, plan, setting) for label, plan in plans.items()}
    measures_memory = setting.memory and (setting.device == "cpu" or setting.device.startswith("cuda"))
    missing = {}
    for label, plan in plans.items():
        cost = known.get(keys[label])
        if setting.remeasure or cost is None or (cost.bytes is None and measures_memory):
            missing[label] = plan
    if missing:
        for label, cost in _measure(shape, missing, setting, on_event).items():
            known[keys[label]] = cost
        _write({key: known[key] for key in keys.values()})
    return {label: known[key] for label, key in keys.items()}


def _measure(shape: HeadShape, plans: Mapping[str, LayerPlan], setting: Setting, on_event: Callback) -> dict[str, Cost]:
    suites = {label: _suite(shape, plan, setting) for label, plan in plans.items()}
    sides = {SOFTMAX: (next(iter(suites.values())), "softmax")} | {x: (one, "linear") for x, one in suites.items()}
    watch = NoiseWatch(setting.device)
    memory: dict[str, int | None] = dict.fromkeys(sides)
    if setting.memory:
        for label, (suite, variant) in sides.items():
            on_event(Started(f"measuring the memory of {label} at {setting.length:,} tokens"))
            memory[label] = memory_of(suite, variant, setting.length).bytes
    on_event(Started(f"timing softmax and {len(plans)} candidates at {setting.length:,} tokens"))
    calls = {label: suite.prepare(variant, setting.length) for label, (suite, variant) in sides.items()}
    timings = in_turns(calls, aim=AIM, least=LEAST, most=MOST)
    calls.clear()
    gc.collect()
    noisy = watch.stop().too_noisy
    # The fastest turn: other work on the machine makes a call slower, never faster.
    times = {label: timing.fastest for label, timing in timings.items()}
    softmax = times[SOFTMAX]
    return {
        label: Cost(times[label] / softmax, times[label], softmax, memory[label], memory[SOFTMAX], noisy)
        for label in plans
    }


def _suite(shape: HeadShape, plan: LayerPlan, setting: Setting) -> AttentionSuite:
    sizes = AttentionSizes(
        plan.kernel,
        plan.arguments,
        plan.hybrid,
        shape.heads,
        shape.head_dim,
        dtype=setting.dtype_name,
        device=setting.device,
        key_heads=shape.key_heads,
        value_dim=shape.value_dim,
    )
    return AttentionSuite(sizes, causal=shape.causal)


def _key(shape: HeadShape, plan: LayerPlan, setting: Setting) -> str:
    """Name a measurement by all that it depends on."""
    facts = {
        "version": __version__,
        "machine": asdict(describe(setting.device, setting.dtype_name)),
        "tokens": setting.length,
        "attention": asdict(_suite(shape, plan, setting)),
        "config": asdict(make_config(kernel_info(plan.kernel), plan.arguments)),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _read() -> dict[str, Cost]:
    """Return the costs in the cache; a damaged file counts as empty."""
    folder = cache_folder()
    if folder is not None:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            entries = {key: cost_of(values) for key, values in read_json(folder / FILE).items()}
            return {key: cost for key, cost in entries.items() if cost is not None}
    return {}


def cost_of(values: Mapping[str, Any]) -> Cost | None:
    """Return a cost from plain data, or None if the data is damaged."""
    numbers = [values.get(name) for name in ("share", "seconds", "softmax_seconds")]
    counts = [values.get(name) for name in ("bytes", "softmax_bytes")]
    right = all(isinstance(n, float) and math.isfinite(n) and n > 0 for n in numbers)
    right = right and all(n is None or (type(n) is int and n >= 0) for n in counts)
    names = {field.name for field in dataclasses.fields(Cost)}
    return Cost(**values) if right and set(values) <= names else None


def _write(costs: Mapping[str, Cost]) -> None:
    """Add costs to the cache, in a new file that is renamed; if that fails, a later search measures again."""
    folder = cache_folder()
    if folder is None:
        return
    fresh = folder / f"{FILE}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        entries = {key: asdict(cost) for key, cost in {**_read(), **costs}.items()}
        fresh.write_text(json.dumps(entries, indent=0))
        fresh.replace(folder / FILE)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
