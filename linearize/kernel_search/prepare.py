"""What comes before the first step: the frozen model, the candidates as modules, what they cost, and the limit.

The frozen model is the model itself, its tensors shared, with a kernel without parameters in every layer that is
searched: through that the layers show q, k and v. The model that was given stays as it was.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.distillation.run import Batches, frozen
from linearize.errors import ConfigError
from linearize.events import Callback, Started
from linearize.kernel_search.candidates import Layout, lay_out, number_of
from linearize.kernel_search.config import SearchConfig
from linearize.kernel_search.costs import Cost, Where, cost_of, dtype_name, measure_costs
from linearize.kernel_search.limits import cost_limit
from linearize.kernel_search.table import Entry, Table
from linearize.kernel_search.trainer import Bench, Key
from linearize.kernel_search.whole import WholeModel
from linearize.kernel_search.widths import effective_ranks, width_arguments
from linearize.loading import move
from linearize.modeling.plan import LayerPlan, Plan
from linearize.surgery.apply import apply

CARRIER = "elu"
"""The kernel of the frozen model, which is never run: it has no parameters and serves every attention."""
NO_FSDP = (
    "search: got FSDP, expected one process or plain data parallelism (DDP); launch without FSDP, or search first "
    "on one device (linearize search MODEL --plan-out FILE.yaml) and convert with --plan FILE.yaml"
)
Costs = Mapping[int, Mapping[str, Cost]]
"""By layer number and label."""


@dataclass(frozen=True)
class Given:
    """What a search is given beside model, data and options.

    Attributes:
        base: the plan whose converted layers are searched.
        max_length: longest input that the result shall take.
        on_event: called with what begins.
    """

    base: Plan
    max_length: int | None
    on_event: Callback


def carrier_of(model: PreTrainedModel, base: Plan) -> PreTrainedModel:
    """Return a model with the tensors of `model` whose layers of `base` can be observed; `model` stays as it is."""
    shared: dict[int, object] = {id(x): x for x in [*model.parameters(), *model.buffers()]}
    made = copy.deepcopy(model, shared)
    plain = [layer.bare(CARRIER) if layer.converted else layer for layer in base.layers]
    return apply(made, replace(base, layers=tuple(plain)))


def check_processes(accelerator: Accelerator) -> None:
    """Refuse FSDP, as kernels of all candidates and whole plans are tried on a model that every process has.

    Raises:
        ConfigError: under FSDP.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ConfigError(NO_FSDP)


def held_out_of(data: Batches) -> list[dict[str, Tensor]]:
    """Return the held-out batches.

    Raises:
        ConfigError: if there are none.
    """
    held_out = data.holdout_batches()
    if not held_out:
        raise ConfigError("search: got no held-out batch to compare candidates on; set some rows aside (--holdout)")
    return held_out


@contextlib.contextmanager
def open_frozen(model: PreTrainedModel, base: Plan, accelerator: Accelerator) -> Iterator[PreTrainedModel]:
    """Show q, k and v of every layer that is searched while the block runs: the frozen model, on its device."""
    move(model, accelerator.device)
    carrier = carrier_of(model, base)
    with frozen(carrier):
        yield carrier


@dataclass
class Prepared:
    """What a search works on.

    Attributes:
        layout: what every candidate would be in every layer.
        costs: of every candidate in every layer.
        limit: of a plan's cost, as a share of softmax's.
        table: the candidates' figures.
        bench: the candidates as modules.
        whole: tries choices on the whole model.
        ranks: effective ranks by layer number, where widths are chosen by them.
    """

    layout: Layout
    costs: Costs
    limit: float
    table: Table
    bench: Bench
    whole: WholeModel
    ranks: dict[int, float] | None


def prepare(
    model: PreTrainedModel,
    original: PreTrainedModel,
    given: Given,
    config: SearchConfig,
    held_out: list[dict[str, Tensor]],
    accelerator: Accelerator,
    record: Mapping[str, object] | None,
) -> Prepared:
    """Lay out the candidates, measure what they cost, and build them.

    Args:
        model: the frozen model.
        original: the model that was given.
        given: see there.
        config: options.
        held_out: held-out batches.
        accelerator: says the device.
        record: of the state of the run that goes on, which has its own costs; or None.

    Raises:
        ConfigError: if a candidate cannot serve the model, or no plan meets the budget.
    """
    layers = linear_attentions(model.base_model)
    hosts = {number_of(layer): layers[layer.module] for layer in given.base.converted}
    ranks, arguments = None, None
    if config.widths is not None:
        given.on_event(Started("measuring the effective rank of queries and keys"))
        ranks = effective_ranks(model, hosts, held_out, accelerator)
        arguments = width_arguments(config.candidates, given.base, ranks, config.widths)
    layout = lay_out(
        original,
        given.base,
        config.candidates,
        softmax=config.softmax_layers > 0,
        max_length=given.max_length,
        arguments=arguments,
    )
    costs = known_costs(record, layout)
    if costs is None:
        found: list[Any] = [None]
        if accelerator.is_main_process:
            where = Where(
                config.length,
                str(accelerator.device),
                dtype_name(next(original.parameters()).dtype),
                config.memory,
                config.remeasure,
            )
            found[0] = _measure(layout, where, given.on_event)
        if accelerator.num_processes > 1:
            broadcast_object_list(found)
        costs = found[0]
    assert costs is not None
    limit = cost_limit(layout, costs, config)
    modules: dict[Key, LinearAttention] = {}
    for label, plans in layout.plans.items():
        for number, layer in plans.items():
            made = LinearAttention(*layer.mixer)
            made.reset_parameters(given.base.seed + number)
            modules[number, label] = made.to(accelerator.device).requires_grad_(False)
    bench = Bench(hosts, modules)
    whole = WholeModel(model, bench, held_out, accelerator, config.precision)
    return Prepared(layout, costs, limit, _table(layout, costs), bench, whole, ranks)


def _table(layout: Layout, costs: Costs) -> Table:
    times = {n: next(iter(own.values())).softmax_seconds for n, own in costs.items()}
    total = sum(times.values())
    rows = {n: {label: Entry(cost.share) for label, cost in own.items()} for n, own in costs.items()}
    return Table(rows, {n: seconds / total for n, seconds in times.items()}, layout.reference, layout.labels)


def known_costs(record: Mapping[str, Any] | None, layout: Layout) -> dict[int, dict[str, Cost]] | None:
    """Return the costs that a state's record has; None where it lacks one."""
    if record is None or "costs" not in record:
        return None
    found: dict[int, dict[str, Cost]] = {}
    for number, own in record["costs"].items():
        costs = {label: cost_of(values) for label, values in own.items()}
        found[int(number)] = {label: cost for label, cost in costs.items() if cost is not None}
    complete = all(set(found.get(number, ())) == set(layout.plans) for number in layout.numbers)
    return found if complete else None


def _measure(layout: Layout, where: Where, on_event: Callback) -> dict[int, dict[str, Cost]]:
    """Measure the candidates in all layers of one size together: each once, however many layers would have it alike."""
    of_shape: dict[object, list[LayerPlan]] = {}
    for layer in layout.layers:
        of_shape.setdefault(layer.shape, []).append(layer)
    found: dict[int, dict[str, Cost]] = {}
    for layers in of_shape.values():
        named: dict[str, LayerPlan] = {}
        name_of: dict[tuple[int, str], str] = {}
        for number in map(number_of, layers):
            for label, own in layout.plans.items():
                plan = own[number]
                same = (name for name, one in named.items() if one.mixer == plan.mixer)
                name = next(same, label if label not in named else f"{label} in layer {number}")
                named[name], name_of[number, label] = plan, name
        costs = measure_costs(layers[0].shape, named, where, on_event)
        for number in map(number_of, layers):
            found[number] = {label: costs[name_of[number, label]] for label in layout.plans}
    # As the layers stand, whatever their sizes.
    return {number: found[number] for number in layout.numbers}
