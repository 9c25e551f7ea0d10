"""What a plan may cost, and whether any can."""

from __future__ import annotations

from collections.abc import Mapping

from linearize.errors import ConfigError
from linearize.kernel_search.candidates import Layout
from linearize.kernel_search.config import SearchConfig
from linearize.kernel_search.costs import Cost


def cost_limit(layout: Layout, costs: Mapping[int, Mapping[str, Cost]], config: SearchConfig) -> float:
    """Return the most that a plan may take, as a share of the time of all layers under softmax.

    Where the budget says no cost, it is that of the reference in every layer; each layer that may stay softmax raises
    it by what the dearest of them takes more.

    Raises:
        ConfigError: if no plan meets the budget; says the nearest that does.
    """
    times = {n: next(iter(own.values())).softmax_seconds for n, own in costs.items()}
    total = sum(times.values())
    own = {n: times[n] / total * costs[n][layout.reference].share for n in costs}
    if config.cost is None:
        dearer = sorted((max(0.0, times[n] / total - own[n]) for n in costs), reverse=True)
        limit = sum(own.values()) + sum(dearer[: config.softmax_layers])
    else:
        # A cost that was read off a table has three digits: the reference that takes it meets it.
        same = f"{sum(own.values()):.3g}" == f"{config.cost:.3g}"
        limit = max(config.cost, sum(own.values())) if same else config.cost
    least = {n: min(layout.labels, key=lambda x: costs[n][x].share) for n in costs}
    nearest = sum(times[n] / total * costs[n][label].share for n, label in least.items())
    if nearest > limit * (1 + 1e-9):
        names = ", ".join(dict.fromkeys(least.values()))
        # Rounded up, so that what is named is met.
        named = f"{nearest * 1.0005 + 5e-5:.4f}"
        asked = f"cost={limit:.4g}" if config.cost is not None else f"the cost of {layout.reference} in every layer"
        raise ConfigError(
            f"budget: no plan meets {asked}: at {config.length:,} tokens the cheapest ({names}) takes {nearest:.4g} of "
            f"softmax's time; the nearest that is met is --budget cost={named}, or give a longer --length"
        )
    return limit
