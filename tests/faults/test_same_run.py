"""Resume: what a run depends on is held against what it was started with, and what differs is named."""

import numpy as np
import pytest
import torch
from tiny import converted, original

import linearize
from linearize.checkpoint.fingerprint import ROWS, check_same, data_digest, fingerprint, rows_digest, weights_digest
from linearize.errors import ConfigError


def test_a_fingerprint_changes_with_every_part():
    model = converted("bert")
    rows = [{"input_ids": [1, 2, 3], "label": 0.5}, {"input_ids": [4], "label": None}]
    first = fingerprint(model=model, data=rows, options={"rate": 0.1, "betas": (0.9, 0.95)})
    check_same(first, fingerprint(model=converted("bert"), data=rows, options={"rate": 0.1, "betas": [0.9, 0.95]}))
    assert set(first) == {"rate", "betas", "data contents", "kernels", "model weights", "kernel weights"}
    with torch.no_grad():
        next(iter(model.parameters()))[0, 0] += 1e-6
    with pytest.raises(ConfigError, match="started with model weights='"):
        check_same(first, fingerprint(model=model, data=rows, options={"rate": 0.1, "betas": (0.9, 0.95)}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"options": {"rate": 0.2}}, r"rate=0\.1, now it is 0\.2"),
        ({"options": {"rate": 0.1, "more": 1}}, "does not say with which more"),
        ({"options": {}}, r"rate=0\.1, which is not there now"),
        ({"data": [[1, 2], [3, 5]]}, "data contents='"),
    ],
)
def test_what_differs_is_named(change, named):
    given = {"data": [[1, 2], [3, 4]], "options": {"rate": 0.1}}
    with pytest.raises(ConfigError, match=named):
        check_same(fingerprint(**given), fingerprint(**given | change))


@pytest.mark.parametrize("change", [{"kernel": "t2r"}, {"kernel_args": {"activation": "exp"}}, {"window": 4}])
def test_kernels_are_compared_by_their_arguments(change):
    """Also where the weights are the same numbers, as those of two activations are."""
    first = fingerprint(model=linearize.convert(original("bert"), **{"kernel": "hedgehog"}))
    other = fingerprint(model=linearize.convert(original("bert"), **{"kernel": "hedgehog"} | change))
    with pytest.raises(ConfigError, match=r"started with kernels=\{'encoder\.layer\.0"):
        check_same(first, other)


def test_no_two_values_have_one_hash():
    values = [
        [], [[]], "", b"", [""], ["ab", "c"], ["a", "bc"], {"a": 1}, {"a": 1.0}, {"a": True}, {"a": None}, [1, 2],
        [[1], [2]], [1, 2, 0], np.zeros(2), np.zeros(2, dtype=np.int64), np.zeros((2, 1)), torch.zeros(2),
        torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1, 2), [2**70], [2**70 + 1],
    ]  # fmt: skip
    assert len({data_digest([value]) for value in values}) == len(values)
    assert data_digest({"b": 1, "a": 2}) == data_digest({"a": 2, "b": 1})
    with pytest.raises(TypeError, match="got object"):
        data_digest([object()])


def test_many_rows_are_sampled_and_counted():
    class Many:
        def __init__(self, count):
            self.count = count

        def __len__(self):
            return self.count

        def __getitem__(self, place):
            return {"input_ids": [place % 7]}

    digests = {rows_digest(Many(count)) for count in (1, ROWS, ROWS + 1, 10**9)}
    assert len(digests) == 4


def test_weights_of_any_type_are_hashed():
    model = torch.nn.Module()
    for name, dtype in (("b", torch.bfloat16), ("i", torch.int8)):
        model.register_buffer(name, torch.ones(3, 2).to(dtype))
    model.register_buffer("scalar", torch.tensor(2.0))
    first = weights_digest(model)
    model.scalar += 1
    assert weights_digest(model) != first
