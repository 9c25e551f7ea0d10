"""Which positions start a new document: as in the original, for every pattern that a user or host can give."""

from __future__ import annotations

import functools

import pytest
import torch
from support.generation import causal
from support.tiny import original

from linearize.attention.packing import find_segments
from linearize.core.errors import UnsupportedModelError

T = 12
RESTARTS = [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]
PATTERNS = {
    "plain": list(range(T)),
    "offset": list(range(7, 7 + T)),
    "restart": RESTARTS,
    "restart elsewhere": [5, 6, 7, 8, 2, 3, 4, 5, 6, 9, 10, 11],
    "repeated": [0, 1, 2, 2, 3, 4, 5, 6, 6, 6, 7, 8],
    "gaps": [0, 1, 2, 5, 6, 7, 8, 9, 20, 21, 22, 23],
    "constant": [3] * T,
    "decreasing": list(range(T, 0, -1)),
    "left padding": [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8],
    "right padding": [0, 1, 2, 3, 4, 5, 6, 7, 1, 1, 1, 1],
}
ROWS = {"a row each": 2, "one row for all": 1}
STARTS_AT_0 = {"restart", "left padding"}


@functools.cache
def pair(name):
    """An original and its conversion, whose layers are causal."""
    sizes = {"sliding_window": 64} if name == "gemma3" else {}
    return original(name, "AutoModelForCausalLM", **sizes), causal(name, config=sizes)


def reached(model, given):
    """Which tokens [T] each token's logits depend on, of the second row: [T, T]."""
    ids = torch.arange(3, 3 + 2 * T).view(2, T)
    seen = []
    with torch.no_grad():
        before = model(input_ids=ids, **given).logits[1]
        for at in range(T):
            other = ids.clone()
            other[1, at] = 90
            seen.append((model(input_ids=other, **given).logits[1] - before).abs().amax(dim=-1) > 1e-7)
    return torch.stack(seen, dim=1)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("use_cache", [None, True, False])
@pytest.mark.parametrize("masked", [False, True], ids=["", "with a mask"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "mistral", "gemma3"])
@pytest.mark.sampled("pairs", "pattern", "name", "use_cache")
@pytest.mark.sampled("pairs", "pattern", "masked", "use_cache", "rows")
def test_documents_are_those_of_the_original(name, pattern, masked, use_cache, rows):
    positions = torch.tensor([PATTERNS[pattern]]).expand(2, -1).clone()
    # The first row holds one document.
    positions[0] = torch.arange(T)
    given = {"position_ids": positions if rows == 2 else positions[1:]}
    given |= {"attention_mask": torch.ones(2, T, dtype=torch.long)} if masked else {}
    given |= {} if use_cache is None else {"use_cache": use_cache}
    plain, linear = pair(name)
    want = reached(plain, given)
    if pattern in STARTS_AT_0 and use_cache and not masked:
        # A row of several documents has no cache to give.
        with pytest.raises(UnsupportedModelError, match=r"with a generation cache.*or pass use_cache=False$"):
            linear(input_ids=torch.full((2, T), 3), **given)
        return
    if pattern in STARTS_AT_0 and use_cache is None and not masked:
        # The original finds packed rows only without a cache. Here collated rows need no option.
        want = reached(plain, given | {"use_cache": False})
    assert torch.equal(reached(linear, given), want)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_positions_with_axes_of_their_own(pattern, cached):
    """Of Qwen-VL: [3, B, T] are time, height and width, which repeat; [4, B, T] begin with those of the text."""
    plain, tokens = torch.tensor([PATTERNS[pattern]]), torch.zeros(1, T)
    want = find_segments(True, tokens, {"position_ids": plain}, cached=cached)
    four = torch.stack([plain, plain * 0, plain * 0, plain * 0])
    got = find_segments(True, tokens, {"position_ids": four}, cached=cached)
    assert (got is None) == (want is None) and (got is None or torch.equal(got, want))
    assert find_segments(True, tokens, {"position_ids": four[1:]}, cached=cached) is None
    assert find_segments(False, tokens, {"position_ids": plain}, cached=cached) is None
