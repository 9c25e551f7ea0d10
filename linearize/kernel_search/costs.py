"""The cost of a candidate: the time of one attention layer at one length, relative to softmax, and cached.

Softmax and all candidates of one size are timed in turns (`bench.meter`), so that other work on the machine
slows all of them alike; a cost is the share of softmax's time in the same turns. Costs are stored in the user's cache
folder, by machine, versions, sizes and arguments, so that a second search reuses them.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from linearize import __version__
from linearize.attention.native.locate import cache_folder
from linearize.core.errors import ConfigError
from linearize.core.events import Callback, Started
from linearize.core.options import convert
from linearize.core.parsing import read_json, write_file
from linearize.core.registry import kernel_info, make_config
from linearize.evaluation.bench.meter import DTYPES, Noise, describe, in_turns
from linearize.evaluation.bench.suites import AttentionSizes, AttentionSuite
from linearize.kernel_search.candidates import Layout
from linearize.modeling.plan import SOFTMAX, LayerPlan

FILE = "attention-costs.json"
AIM, LEAST, MOST = 5.0, 5, 50
"""Seconds for all turns of a measurement in total, and the smallest and largest number of turns."""


@dataclass(frozen=True)
class Cost:
    """The cost of one attention layer.

    Attributes:
        share: share of softmax's time in the same turns.
        seconds: time of the fastest turn.
        softmax_seconds: time of softmax's fastest turn.
        noisy: whether the machine was too noisy to trust the figures; such costs are not cached.
    """

    share: float
    seconds: float
    softmax_seconds: float
    noisy: bool = False


Costs = Mapping[int, Mapping[str, Cost]]
"""Costs by layer number and label."""


def costs_of_layers(layout: Layout, length: int, device: str, dtype: torch.dtype, on_event: Callback) -> Costs:
    """Return the costs of all candidates in all layers; layers with the same attention are measured once.

    Args:
        layout: the candidates of every layer.
        length: length of the inputs in tokens.
        device: device that the attention layers run on.
        dtype: dtype of the inputs; dtypes not in `bench.meter.DTYPES` are measured in fp32.
        on_event: called before each measurement.
    """
    name = next((name for name, known in DTYPES.items() if known == dtype), "float32")
    groups: dict[str, dict[str, Cost]] = {}
    costs = {}
    for number in layout.layers:
        suites = {label: suite_of(plans[number], device, name) for label, plans in layout.plans.items()}
        # Layers of the same sizes have equal suites.
        sizes = repr(suites)
        if sizes not in groups:
            groups[sizes] = measure_costs(suites, length, on_event)
        costs[number] = groups[sizes]
    return costs


def suite_of(plan: LayerPlan, device: str, dtype: str) -> AttentionSuite:
    """Return a layer's attention as a suite to measure."""
    shape = asdict(plan.shape)
    causal = shape.pop("causal")
    sizes = AttentionSizes(plan.kernel, plan.arguments, plan.hybrid, dtype=dtype, device=device, **shape)
    return AttentionSuite(sizes, causal=causal)


def measure_costs(suites: Mapping[str, AttentionSuite], length: int, on_event: Callback) -> dict[str, Cost]:
    """Return the cost of every candidate in attention layers of one size, from the cache if known.

    Args:
        suites: each candidate's attention, by label.
        length: length of the inputs in tokens.
        on_event: called before the measurement.
    """
    folder = cache_folder()
    known: dict[str, Cost] = {}
    if folder is not None:
        # A damaged file counts as empty.
        with contextlib.suppress(OSError, ValueError):
            known = convert(dict[str, Cost], read_json(folder / FILE), FILE)
    keys = {label: _key(suite, length) for label, suite in suites.items()}
    missing = {label: suite for label, suite in suites.items() if keys[label] not in known}
    if missing:
        first = next(iter(missing.values()))
        watch = Noise(first.device)
        on_event(Started(f"timing softmax and {len(missing)} candidates at {length:,} tokens"))
        calls = {SOFTMAX: first.prepare("softmax", length)}
        calls |= {label: suite.prepare("linear", length) for label, suite in missing.items()}
        timings = in_turns(calls, aim=AIM, least=LEAST, most=MOST)
        calls.clear()
        gc.collect()
        noisy = watch.stop().too_noisy
        # The fastest turn counts: other work on the machine makes a call slower, never faster.
        softmax = timings[SOFTMAX].fastest
        for label in missing:
            seconds = timings[label].fastest
            known[keys[label]] = Cost(seconds / softmax, seconds, softmax, noisy)
    if missing and folder is not None:
        # The file is replaced as a whole; if that fails, a later search measures again.
        with contextlib.suppress(OSError, ConfigError):
            folder.mkdir(parents=True, exist_ok=True)
            values = {key: asdict(cost) for key, cost in known.items() if not cost.noisy}
            write_file(folder / FILE, "costs", json.dumps(values, indent=0).encode())
    return {label: known[key] for label, key in keys.items()}


def _key(suite: AttentionSuite, length: int) -> str:
    """Return a cache key made of everything that a measurement depends on."""
    sizes = suite.sizes
    facts = {
        "version": __version__,
        "machine": describe(sizes.device, sizes.dtype),
        "tokens": length,
        "attention": asdict(suite),
        "config": asdict(make_config(kernel_info(sizes.kernel), sizes.kernel_args)),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
