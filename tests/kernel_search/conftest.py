"""A tiny model whose attention counts for much, and costs that are given instead of measured."""

from __future__ import annotations

import pytest
from support.training import Fixed, batches, loud

from linearize.kernel_search.costs import Cost

SHARES = {"hedgehog": 0.2, "hedgehog:tied=false": 0.2, "flexformer_n": 0.3, "t2r": 0.1, "elu": 0.05}


@pytest.fixture
def given_costs(monkeypatch):
    """Have every candidate cost a share of softmax's time that does not depend on the machine; returns the shares."""
    shares = dict(SHARES)

    def measure(suites, length, on_event):
        return {x: Cost(shares.get(x, 0.25), 0.01 * shares.get(x, 0.25), 0.01) for x in suites}

    monkeypatch.setattr("linearize.kernel_search.costs.measure_costs", measure)
    return shares


@pytest.fixture
def model():
    return loud("bert")


@pytest.fixture
def data(model):
    rows = batches(model, 6)
    return Fixed(rows[:4], rows[4:])
