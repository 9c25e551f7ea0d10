"""`--window auto`: choose every layer's window and exact keys, and whether it has a kernel, under a budget of bytes.

Layers differ: one puts half of softmax's weight outside a window of 64 tokens, another a twelfth. The total state of
all layers may be as large as with a reference in every layer, in the bytes that decoding holds for one sequence:
`linearize.attention.factory.state_bytes`. If the reference looks up blocks, a layer chooses how many instead of its
window and exact keys. Then all keys are held anyway, so the bytes are those that a step reads (`read_bytes`). Nothing
is trained:

1. The outputs of every choice for every layer are computed from the frozen model's q, k and v. The log-scales of the
   choice are fitted in closed form on other rows (`linearize.training.stage_one.start`).
2. The squared error of a layer is weighted by how much of it reaches the whole model's last hidden state if only this
   layer is replaced.
3. Minimising the sum of errors under the budget is a knapsack problem with one choice per layer.
4. The whole model decides between that plan, the best plan without weights, and one choice for all layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.factory import state_bytes
from linearize.attention.interface import observed
from linearize.attention.layer import LinearAttention
from linearize.attention.parts import HEADS, NEAR, ROUTED, SCALED, check_parts, without
from linearize.checkpoint.loading import move
from linearize.core.errors import ConfigError
from linearize.core.events import Callback, Started, ignore
from linearize.core.registry import SCALES, Hybrid
from linearize.fidelity.teacher import frozen_output, run_body
from linearize.kernel_search.candidates import Candidates, Layout
from linearize.kernel_search.loop import carrier_of
from linearize.kernel_search.table import Choice, Entry, Table
from linearize.kernel_search.whole import WholeModel
from linearize.modeling.plan import LayerPlan, Plan
from linearize.training.run import Batches, frozen
from linearize.training.sharding import make_accelerator
from linearize.training.stage_one.loss import Targets
from linearize.training.stage_one.start import ROWS, fit_scales

WINDOWS = (0.25, 0.5, 1, 2, 4)
"""Windows to choose from, as multiples of the reference's."""
BLOCKS = (0, 0.25, 0.5, 1, 2, 4)
"""Numbers of routed blocks to choose from, as multiples of the reference's."""
EXACT_KEYS = (0, 0.5)
"""Exact keys to choose from in addition to the reference's, as shares of its window."""
HELD_OUT = 8
"""Maximum number of rows for comparing choices."""
HANDLED = NEAR | ROUTED | SCALED | HEADS
"""The additions that layers may have."""
TOKENS = 2048
"""Maximum number of tokens for fitting scales, and for comparing choices; a single longer row is allowed."""


def choices_of(layer: LayerPlan) -> dict[str, LayerPlan]:
    """Return the choices for a layer with a window, by label; the layer itself comes first."""
    hybrid = layer.hybrid
    assert hybrid.window is not None
    blocks, size = hybrid.blocks
    if blocks:
        counts = [max(1, round(factor * blocks)) if factor else 0 for factor in BLOCKS]
        alone = [
            replace(hybrid, routed_blocks=f"{count}:{size}") if count else without(hybrid, ROUTED) for count in counts
        ]
        beside = alone
    else:
        alone = [replace(hybrid, window=max(1, round(factor * hybrid.window)), exact_keys=0) for factor in WINDOWS]
        more = EXACT_KEYS if hybrid.scale != SCALES[0] else EXACT_KEYS[:1]
        exact = [hybrid.exact_keys + round(factor * hybrid.window) for factor in more]
        beside = [replace(one, exact_keys=count) for one, count in itertools.product(alone, exact)]
    choices = [layer, *(replace(layer, hybrid=one) for one in beside)]
    silent = [replace(one, scale=SCALES[0]) for one in alone]
    choices += [replace(layer, kernel="none", arguments={}, hybrid=one) for one in silent]
    return {_label(choice): choice for choice in choices} | {_label(layer): layer}


def read_bytes(layer: LayerPlan, dtype: torch.dtype) -> int:
    """Return the bytes that a decoding step reads in a layer: its state, of the memory only the looked-up keys.

    Left out are the 8 channels of all keys by which blocks are chosen.

    Args:
        layer: the plan of the layer.
        dtype: type of the model's keys and values.
    """
    (blocks, size), shape = layer.hybrid.blocks, layer.shape
    near = replace(layer, hybrid=without(layer.hybrid, ROUTED))
    heads = len(layer.hybrid.routed_heads) or shape.heads
    looked_up = blocks * size * heads * (shape.head_dim + shape.value_dim)
    return state_bytes(*near.mixer, dtype=dtype) + looked_up * dtype.itemsize


def _reads(hybrid: Hybrid) -> int:
    """Return the keys that a query reads in the window and in looked-up blocks."""
    return (hybrid.window or 0) + math.prod(hybrid.blocks)


def _label(layer: LayerPlan) -> str:
    parts = {name: getattr(layer.hybrid, name) for name in ("window", "exact_keys", "routed_blocks")}
    return ":".join([layer.kernel, *(f"{name}={value}" for name, value in parts.items() if value)])


def choose_windows(
    model: PreTrainedModel, data: Batches, base: Plan, on_event: Callback = ignore
) -> tuple[Plan, dict[int, str], float, float]:
    """Choose the windows of a model that is not converted yet; the model is unchanged afterwards.

    Args:
        model: the model that `base` was made for.
        data: training rows for fitting the scales, held-out rows for the errors. Choices whose queries read more than
            half a row are left out, because they would look exact.
        base: the plan whose layers with a window are the reference.
        on_event: called with `Started` for each of the steps, and `Advanced` after every part of the last two.

    Returns:
        The plan, with a window, exact keys or routed blocks, and a kernel or no kernel for every layer; the reason for
        each layer's choice, by layer number; the error of the last hidden state before training, relative to its
        spread; and the same error with the reference in every layer, which holds (or reads) as many bytes or more.

    Raises:
        ConfigError: if no layer has a window, or there are no held-out rows.
    """
    layers = {layer.index: layer for layer in base.converted if layer.index is not None and layer.hybrid.window}
    held_out = [some_rows(batch, HELD_OUT) for batch in data.holdout_batches()[:1]]
    if not layers or not held_out:
        raise ConfigError(f"window: got auto, but {'no held-out rows' if layers else 'no layer takes a window'}")
    for layer in layers.values():
        check_parts(layer.hybrid, HANDLED, "window: auto")
    options = {number: choices_of(layer) for number, layer in layers.items()}
    reference: Choice = tuple(next(iter(own)) for own in options.values())
    labels = list(dict.fromkeys(label for own in options.values() for label in own))
    plans = {label: {n: own[label] for n, own in options.items() if label in own} for label in labels}
    layout = Layout(base, layers, tuple(labels), plans, reference[0])
    accelerator = make_accelerator(model)
    move(model, accelerator.device)
    kept = (layer.bare() for layer in base.layers if layer.index not in layers)
    carrier = carrier_of(model, base.with_layers(kept))
    with frozen(carrier):
        candidates = Candidates(layout, carrier, accelerator.device)
        rows = some_rows(next(data.train_batches()), ROWS)
        on_event(Started("choosing the windows: fitting the scales"))
        tokens = _fit(carrier, candidates, {name: value.to(accelerator.device) for name, value in rows.items()})
        keys = [
            (n, label)
            for place, (n, own) in enumerate(options.items())
            for label, choice in own.items()
            if label == reference[place] or _reads(choice.hybrid) <= tokens.get(n, 0) // 2
        ]
        whole = WholeModel(carrier, candidates, held_out, accelerator, head=False, on_event=on_event)
        on_event(Started(f"choosing the windows: measuring {len(keys)} choices of single layers"))
        error = whole.errors_of(keys)
        # In a search, choices cost time. Here they cost state, as a share of the reference's state in all layers.
        sizes: dict[str, int] = {}
        size_of: dict[tuple[int, str], int] = {}
        for number, label in keys:
            mixer = options[number][label].mixer
            # Most layers have the same shape.
            if (text := repr(mixer)) not in sizes:
                sizes[text] = read_bytes(options[number][label], model.dtype)
            size_of[number, label] = sizes[text]
        limit = sum(size_of[number, label] for number, label in zip(layers, reference, strict=True))
        entries: dict[int, dict[str, Entry]] = {number: {} for number in layers}
        for number, label in keys:
            entries[number][label] = Entry(size_of[number, label], error[number, label])
        table = Table(entries, dict.fromkeys(layers, 1 / limit), reference[0], labels)
        on_event(Started("choosing the windows: trying them on the whole model"))
        chosen = whole.decide(table, reference, reference, table.best())
    why = {
        number: f"error of the layer's output {error[number, label]:.3g}, with {usual} {error[number, usual]:.3g}"
        for number, label, usual in zip(layers, chosen, reference, strict=True)
    }
    return layout.plan(chosen, {}), why, whole.known[chosen].hidden, whole.known[reference].hidden


def some_rows(batch: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Return at most `rows` rows of a batch, with at most `TOKENS` tokens in total but at least one row."""
    longest = max((value.shape[1] for value in batch.values() if value.ndim == 2), default=1)
    return {name: value[: min(rows, max(1, TOKENS // longest))] for name, value in batch.items()}


def _fit(model: PreTrainedModel, candidates: Candidates, batch: Mapping[str, Tensor]) -> dict[int, int]:
    """Fit the scales of all candidates whose windows are not too wide for the rows; return each layer's tokens per row.

    Layers may differ: the rows of a decoder may be shorter than those of its encoder.

    Candidates of a layer that differ only in their exact keys share the fit of the first of them.
    """
    tokens: dict[int, int] = {}

    def observe(
        layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        number = candidates.number_of[id(layer)]
        tokens[number] = min(q.shape[2], tokens.get(number, q.shape[2]))
        fitted: dict[int | None, LinearAttention] = {}
        for (n, _), module in candidates.modules.items():
            hybrid = module.hybrid
            if n != number or hybrid.scale == SCALES[0] or _reads(hybrid) > q.shape[2] // 2:
                continue
            if hybrid.window in fitted:
                module.load_state_dict(fitted[hybrid.window].state_dict())
            else:
                fit_scales(module, Targets(q, k, scaling, layer.shape.causal, mask))
                fitted[hybrid.window] = module
        return frozen_output(layer, q, k, v, mask, scaling)

    with torch.no_grad(), observed(model, observe):
        run_body(model, batch)
    return tokens
