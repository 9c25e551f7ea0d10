"""Search the plan of a tiny model in one process or in several."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch

from linearize.kernel_search.config import SearchConfig
from linearize.kernel_search.costs import Cost
from linearize.kernel_search.loop import search
from support.training import Split, batches, loud

SHARES = {"hedgehog": 0.2, "flexformer_n": 0.3, "t2r": 0.1}


def run() -> dict[str, object]:
    """Search, and return the plan with all figures; costs are given, by the main process alone."""
    model = loud("bert")
    main = os.environ.get("RANK", "0") == "0"

    def measure(suites, length, on_event):
        assert main
        return {x: Cost(SHARES[x], 0.01 * SHARES[x], 0.01) for x in suites}

    config = SearchConfig(candidates=tuple(SHARES), steps=12, budget="cost=0.25")
    with mock.patch("linearize.kernel_search.costs.measure_costs", measure):
        result = search(model, Split(batches(model)), config)
    losses = [report.loss for report in result.history]
    layers = [{"label": one.label, "tried": dict(one.tried)} for one in result.layers]
    return {"losses": losses, "layers": layers, "points": [asdict(point) for point in result.points]}


def main(target: str) -> None:
    """Search, and write what was found, every process for itself."""
    torch.set_num_threads(1)
    found = run()
    Path(f"{target}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found))
