"""Decoding with a softmax window in the native op: outputs and the whole state equal those of the ops in PyTorch."""

import itertools

import pytest
import torch
from support.native_cases import WINDOW_CASES, D, V, close, learned, padding, tokens

from linearize.attention.call import AttentionCall
from linearize.attention.native import engine
from linearize.attention.native.calls import Engine

SCALING = D**-0.5
COUNT, CUT = 40, 11
GROUPS = pytest.mark.parametrize("key_heads", [2, 4], ids=["grouped", "ungrouped"])


@torch.no_grad()
def prefill(mixer, q, k, v, mask=None):
    return mixer(AttentionCall(q, k, v, SCALING, mask, needs_state=True))


@torch.no_grad()
def decode(mixer, q, k, v, state, mask=None):
    return mixer(AttentionCall(q, k, v, SCALING, mask, state=state, needs_state=True))


def go_on(mixer, inputs, state, mask=None):
    """Decode the tokens after the first ones -> outputs and the state after."""
    outputs = []
    for i in range(CUT, inputs[0].shape[2]):
        now = slice(i, i + 1)
        some = None if mask is None else mask[:, now]
        out, state = decode(mixer, *(x[:, :, now] for x in inputs), state, some)
        outputs.append(out)
    return torch.cat(outputs, dim=2), state


def begin(mixer, inputs, mask=None):
    return prefill(mixer, *(x[:, :, :CUT] for x in inputs), None if mask is None else mask[:, :CUT])[1]


def both_ways(switch, mixer, inputs, mask=None):
    """Continue natively and in PyTorch from the same state."""
    state = begin(mixer, inputs, mask)
    found = []
    for on in (True, False):
        switch(on)
        found.append(go_on(mixer, inputs, {name: x.clone() for name, x in state.items()}, mask))
    return found


@GROUPS
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (4, 0), (8, 2), (16, 13), (64, 4)])
@pytest.mark.parametrize("masked", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(("name", "args"), WINDOW_CASES)
@pytest.mark.sampled("values")
def test_equals_the_ops_in_pytorch(switch, name, args, masked, window, sinks, key_heads):
    mixer = learned(name, args, causal=True, key_heads=key_heads, window=window, sinks=sinks)
    mask = padding(COUNT) if masked else None
    (ours, after), (theirs, wanted) = both_ways(switch, mixer, tokens(COUNT, key_heads=key_heads), mask)
    real = slice(None) if mask is None else mask[:, None, CUT:].expand(-1, ours.shape[1], -1)
    # Signed weights: sums near zero make outputs, and rounding, large.
    close(ours[real], theirs[real], 3e-6 if mixer.positive else 3e-4)
    assert after.keys() == wanted.keys()
    for key, tensor in after.items():
        # In empty places, PyTorch's order leaves other tokens of padding.
        if key in ("kv", "log_scale", "tokens", "ring_mask"):
            close(tensor.float(), wanted[key].float())


@pytest.mark.sampled("pairs")
@GROUPS
@pytest.mark.parametrize("value", [V, 64, 32, 3])
@pytest.mark.parametrize("size", [D, 16, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sizes_and_types(switch, dtype, size, value, key_heads):
    """Whole vectors of every processor, and rests; what is kept of a token is as it came, to the bit."""
    mixer = learned("hedgehog", {}, causal=True, size=size, value=value, key_heads=key_heads, window=6, sinks=2)
    inputs = tokens(COUNT, size=size, value=value, key_heads=key_heads, dtype=dtype)
    (ours, after), (theirs, wanted) = both_ways(switch, mixer, inputs)
    close(ours, theirs, 3e-6 if dtype == torch.float32 else 2**-8)
    for key, tensor in after.items():
        if key in ("kv", "log_scale"):
            close(tensor, wanted[key])
        else:
            assert torch.equal(tensor, wanted[key]), key


def test_steps_and_longer_pieces_take_turns(switch):
    """PyTorch can continue from its state, and it from PyTorch's."""
    mixer = learned("hedgehog", {"activation": "exp"}, causal=True, window=8, sinks=3)
    inputs = tokens(90)
    whole, _ = prefill(mixer, *inputs)
    state, outputs = None, []
    for start, stop in [(0, 2), (2, 3), (3, 4), (4, 30), *((i, i + 1) for i in range(30, 50)), (50, 89), (89, 90)]:
        piece = [x[:, :, start:stop] for x in inputs]
        out, state = prefill(mixer, *piece) if state is None else decode(mixer, *piece, state)
        outputs.append(out)
    close(torch.cat(outputs, dim=2), whole)


def test_empty_places_of_a_wide_window_are_not_moved(switch):
    """To shift the whole ring at every step made a window of 4,096 tokens three times as slow as a full cache."""
    mixer = learned("hedgehog", {}, causal=True, window=20)
    inputs, mask = tokens(CUT + 1), padding(COUNT)[:, : CUT + 1]
    state = begin(mixer, inputs, mask)
    empty = (~state["ring_mask"]).sum(dim=1).tolist()
    rings = [state[name] for name in ("ring_k", "ring_v")]
    for ring in rings:
        for row, count in enumerate(empty):
            # A number for each place, so that a shift shows.
            ring[row, :, :count] = torch.arange(count).view(-1, *[1] * (ring.ndim - 3)).to(ring.dtype)
    before = [ring.clone() for ring in rings]
    switch(True)
    go_on(mixer, inputs, state, mask)
    assert min(empty) > 5
    for row, count in enumerate(empty):
        assert all(
            torch.equal(x[row, :, : count - 1], y[row, :, : count - 1]) for x, y in zip(rings, before, strict=True)
        )


def test_it_is_what_decodes(monkeypatch, switch):
    steps, step = [], Engine.window_step
    monkeypatch.setattr(Engine, "window_step", lambda *args, **more: steps.append(1) or step(*args, **more))
    mixer = learned("flexformer_n", {}, causal=True, window=8, sinks=2)
    inputs = tokens(COUNT)
    go_on(mixer, inputs, begin(mixer, inputs))
    assert len(steps) == COUNT - CUT
    # A state that is not in one piece is left to PyTorch.
    state = begin(mixer, inputs)
    state["ring_v"] = state["ring_v"].transpose(2, 3).contiguous().transpose(2, 3)
    decode(mixer, *(x[:, :, :1] for x in inputs), state)
    assert len(steps) == COUNT - CUT


def test_a_token_of_padding_changes_nothing(switch):
    mixer = learned("hedgehog", {}, causal=True, window=5, sinks=2)
    inputs = tokens(COUNT)
    state = begin(mixer, inputs)
    before = {name: x.clone() for name, x in state.items()}
    mask = torch.tensor([[False], [True]])
    out, after = decode(mixer, *(torch.full_like(x[:, :, :1], torch.nan) for x in inputs), state, torch.zeros(2, 1))
    assert (out == 0).all()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    _, after = decode(mixer, *(x[:, :, CUT : CUT + 1] for x in inputs), after, mask)
    assert all(torch.equal(after[name][0], x[0]) for name, x in before.items())
    assert all(not torch.equal(after[name][1], before[name][1]) for name in ("kv", "ring_k", "tokens"))


def test_parts_of_very_different_size(switch):
    """Scores and log-scales far apart: the larger part is the output, as in PyTorch; what is no number stays none."""
    mixer = learned("hedgehog", {"activation": "exp"}, causal=True, window=4, sinks=1)
    for size in (1e-3, 30.0, 300.0):
        q, k, v = tokens(COUNT)
        (ours, _), (theirs, _) = both_ways(switch, mixer, [q * size, k, v])
        assert torch.isfinite(ours).all()
        # Scores of thousands: their own rounding, times e.
        close(ours, theirs, max(3e-6, 1e-5 * size))
    q, k, v = tokens(COUNT)
    k[0, 0, 20] = torch.nan
    (ours, _), (theirs, _) = both_ways(switch, mixer, [q, k, v])
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert ours.isnan().any()


def test_threads_make_no_difference(switch):
    mixer = learned("hedgehog", {}, heads=6, key_heads=3, causal=True, window=8, sinks=2)
    inputs, before = tokens(COUNT, heads=6, key_heads=3), torch.get_num_threads()
    # One start for both: PyTorch's products may round otherwise on several threads.
    state, found = begin(mixer, inputs), []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            found.append(go_on(mixer, inputs, {name: x.clone() for name, x in state.items()}))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], x) for name, x in found[1][1].items())


def test_no_memory_is_said_and_nothing_is_changed(monkeypatch, switch):
    mixer = learned("hedgehog", {}, causal=True, window=4)
    inputs = tokens(COUNT)
    state = begin(mixer, inputs)
    monkeypatch.setattr(engine().library, "linearize_window_step", lambda *_: 1)
    with pytest.raises(MemoryError, match="no memory"):
        decode(mixer, *(x[:, :, :1] for x in inputs), state)


def test_every_case_is_joined_with_a_window():
    for (name, args), sinks in itertools.product(WINDOW_CASES, (0, 1)):
        assert learned(name, args, causal=True, window=3, sinks=sinks).window == 3


@torch.no_grad()
def test_of_equal_exact_keys_the_older_stays(switch):
    """Also when a stronger key comes that takes a place: the newest of the equal ones loses it, in all three ways."""
    mixer = learned("t2r", {}, causal=True, window=3, exact_keys=3, scale="linear")
    mixer.key_scale.weight.zero_()[:, 0] = 1.0
    q, k, v = tokens(COUNT)
    # Priorities: many equal ones, then now and then a stronger one.
    k[..., 0] = torch.tensor([0, 0, 1, 0, 1, 1, 1, -1, 1, 1, 1, 1, 1, 1, 2, 1, 2, 1, 2, 3, 2, 3, 3, 3, 3, 4] + 14 * [1])
    found = []
    for native, prefilled in ((True, 1), (False, 1), (True, 18), (False, 18), (True, COUNT), (False, COUNT)):
        switch(native)
        _, state = prefill(mixer, *(x[:, :, :prefilled] for x in (q, k, v)))
        for i in range(prefilled, COUNT):
            _, state = decode(mixer, *(x[:, :, i : i + 1] for x in (q, k, v)), state)
        found.append(state)
    # By hand: each leaving key joins the strongest three, older ones first.
    order = sorted(range(COUNT - 3), key=lambda i: (-float(k[0, 0, i, 0]), i))[:3]
    for state in found:
        torch.testing.assert_close(state["kept_k"], k[:, :, sorted(order)])
        torch.testing.assert_close(state["kept_v"], v[:, :, sorted(order)])
    for step in range(4, COUNT, 3):
        order = sorted(range(step - 3), key=lambda i: (-float(k[0, 0, i, 0]), i))[:3]
        for native in (True, False):
            switch(native)
            _, state = prefill(mixer, *(x[:, :, :2] for x in (q, k, v)))
            for i in range(2, step):
                _, state = decode(mixer, *(x[:, :, i : i + 1] for x in (q, k, v)), state)
            held = state["kept_k"][:, :, : len(order)]
            torch.testing.assert_close(held, k[:, :, sorted(order)])


def test_it_fades_like_the_ops_in_pytorch(switch):
    mixer = learned("hedgehog", {}, causal=True, window=4, scale="linear", trained_length=CUT + 3)
    (ours, _), (theirs, _) = both_ways(switch, mixer, tokens(COUNT))
    close(ours, theirs)
