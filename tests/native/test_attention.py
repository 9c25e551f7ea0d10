"""The native op computes what the ops in PyTorch compute: all kernels it has, both directions, steps, states."""

import copy
import itertools

import pytest
import torch
from support.naive import naive_attention
from support.native_cases import CASES, OPTIONS, PAPER, D, V, close, learned, padding, tokens
from support.rounding import allowed, deviation, gradients_in_double

from linearize.attention.backends.causal import attend_with_state
from linearize.attention.call import AttentionCall
from linearize.attention.native import engine
from linearize.attention.native.build import agreement, check_agreement, native_kernels
from linearize.ops import State, causal_attention, gather_keys

LENGTHS = (1, 15, 48, 49, 200)
"""Tokens: within a tile of the op (48), one of them, one more, several."""
GROUPS = pytest.mark.parametrize("key_heads", [2, 4], ids=["grouped", "ungrouped"])
"""Causal heads use a different code path if each head has its own keys."""


def test_every_native_kernel_is_tested():
    assert sorted(OPTIONS) == native_kernels()


@torch.no_grad()
def attend(mixer, q, k, v, **more):
    return mixer(AttentionCall(q, k, v, D**-0.5, needs_state=mixer.shape.causal, **more))


@torch.no_grad()
def decode(mixer, q, k, v, state, mask=None):
    """One token of generation, which may write into the state's memory."""
    return mixer(AttentionCall(q, k, v, D**-0.5, mask, state=state, needs_state=True))


@GROUPS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "args"), CASES)
@pytest.mark.sampled("pairs")
def test_equals_the_ops_in_pytorch(switch, name, args, causal, key_heads):
    mixer = learned(name, args, causal=causal, key_heads=key_heads)
    for count, masked in itertools.product(LENGTHS[1:], (False, True)):
        mask = padding(count) if masked else None
        switch(True)
        ours, after = attend(mixer, *tokens(count, key_heads=key_heads), key_padding_mask=mask)
        switch(False)
        theirs, wanted = attend(mixer, *tokens(count, key_heads=key_heads), key_padding_mask=mask)
        # Signed weights: sums near zero make outputs, and rounding, large.
        close(ours, theirs, 3e-6 if mixer.positive else 2e-4)
        if causal:
            close(after["kv"], wanted["kv"])
            close(after["log_scale"], wanted["log_scale"])


@pytest.mark.parametrize(("name", "args"), CASES)
def test_really_runs_natively(switch, watch, name, args):
    calls = watch("attend", "step")
    mixer = learned(name, args, causal=True)
    _, state = attend(mixer, *tokens(30))
    decode(mixer, *tokens(1), state)
    attend(learned(name, args), *tokens(30))
    assert calls == ["attend", "step", "attend"]


@GROUPS
@pytest.mark.parametrize("value", [V, 64, 3])
@pytest.mark.parametrize(("name", "args"), CASES)
@pytest.mark.sampled("pairs")
def test_steps_and_pieces_equal_the_whole(switch, name, args, value, key_heads):
    count, cut = 90, 70
    mixer = learned(name, args, causal=True, value=value, key_heads=key_heads)
    q, k, v = tokens(count, value=value, key_heads=key_heads)
    mask = padding(count)
    whole, wanted = attend(mixer, q, k, v, key_padding_mask=mask)
    out, state = attend(mixer, *(x[:, :, :cut] for x in (q, k, v)), key_padding_mask=mask[:, :cut])
    pieces = [out]
    for i in range(cut, count):
        now = slice(i, i + 1)
        out, state = decode(mixer, *(x[:, :, now] for x in (q, k, v)), state, mask[:, now])
        pieces.append(out)
    close(torch.cat(pieces, dim=2), whole, 3e-6 if mixer.positive else 2e-4)
    close(state["kv"], wanted["kv"])
    close(state["log_scale"], wanted["log_scale"])


@GROUPS
@pytest.mark.parametrize(("name", "args"), CASES)
@pytest.mark.sampled("values")
def test_later_tokens_do_not_change_a_bit(switch, name, args, key_heads):
    mixer = learned(name, args, causal=True, key_heads=key_heads)
    q, k, v = tokens(150, key_heads=key_heads)
    before, _ = attend(mixer, q, k, v)
    for x in (q, k, v):
        x[:, :, 101:] *= -30.0
    after, _ = attend(mixer, q, k, v)
    assert torch.equal(before[:, :, :101], after[:, :, :101])
    assert not torch.equal(before[:, :, 101:], after[:, :, 101:])


@GROUPS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "args"), CASES)
@pytest.mark.sampled("values")
def test_padding_does_not_change_real_tokens(switch, name, args, causal, key_heads):
    mixer = learned(name, args, causal=causal, key_heads=key_heads)
    q, k, v = tokens(100, key_heads=key_heads)
    cut = [x[:, :, :70] for x in (q, k, v)]
    short, _ = attend(mixer, *cut)
    mask = torch.arange(100).expand(2, -1) < 70
    padded, _ = attend(mixer, q, k, v, key_padding_mask=mask)
    # Not to the bit: the last tile has another shape, and a processor may round it in another order.
    exact, moves = deviation(
        gradients_in_double(mixer, None, D**-0.5), [*cut, torch.zeros_like(short), *mixer.parameters()]
    )
    limit = allowed(moves[0], D + mixer.feature_dim + 2 * 70)
    for found in (short, padded[:, :, :70]):
        assert (found - exact[0]).abs().max() <= limit


@torch.no_grad()
def round_projections(mixer):
    """What the op does to them itself where inputs are bf16 numbers and the processor multiplies such."""
    for map in (mixer.keys, mixer.queries):
        native = None if map is None else map.map_spec()
        for weight in () if native is None else (native.first, native.second, native.magnitude):
            if weight is not None:
                weight.copy_(weight.bfloat16())


@pytest.mark.parametrize("size", [64, 36, 17], ids=lambda size: f"head_dim={size}")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "args"), CASES)
@pytest.mark.sampled("pairs")
def test_bfloat16(switch, name, args, causal, size):
    mixer = learned(name, args, causal=causal, size=size)
    inputs = tokens(130, size=size, dtype=torch.bfloat16)
    mask = padding(130)
    ours, after = attend(mixer, *inputs, key_padding_mask=mask)
    if engine().pairs and size % 2 == 0:
        round_projections(mixer)
    switch(False)
    theirs, wanted = attend(mixer, *inputs, key_padding_mask=mask)
    # Nothing else is rounded to bf16 but the output: sums and the state are as exact as in fp32.
    if causal:
        close(after["kv"], wanted["kv"])
        close(after["log_scale"], wanted["log_scale"])
    if mixer.positive:
        close(ours, theirs, 2**-8)
        # Of numbers that round to nearest, few differ at all.
        assert (ours != theirs).float().mean() < 0.01
    else:
        # Where signed weights nearly cancel, fp32's rounding is large too.
        assert ((ours.float() - theirs.float()).abs() > 2**-8 * theirs.abs().float() + 1e-3).float().mean() < 0.005


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "args"), [("hedgehog", {}), ("flexformer_s", PAPER), ("flexformer_n", {})])
def test_few_bfloat16_numbers_differ(switch, name, args, causal):
    mixer = learned(name, args, causal=causal)
    inputs = tokens(130, dtype=torch.bfloat16)
    ours, _ = attend(mixer, *inputs)
    if engine().pairs:
        round_projections(mixer)
    switch(False)
    theirs, _ = attend(mixer, *inputs)
    close(ours, theirs, 2**-8)
    assert (ours != theirs).float().mean() < 0.01


@pytest.mark.parametrize(("name", "args"), CASES)
def test_bfloat16_steps_round_as_the_whole_does(switch, name, args):
    mixer = learned(name, args, causal=True)
    q, k, v = tokens(40, dtype=torch.bfloat16)
    _, wanted = attend(mixer, q, k, v)
    _, state = attend(mixer, *(x[:, :, :20] for x in (q, k, v)))
    for i in range(20, 40):
        _, state = decode(mixer, *(x[:, :, i : i + 1] for x in (q, k, v)), state)
    close(state["kv"], wanted["kv"])
    close(state["log_scale"], wanted["log_scale"])


def test_bfloat16_weights_are_left_alone_where_gradients_are_taken(switch):
    mixer = learned("flexformer_n", PAPER, causal=True)
    q, k, v = tokens(40, dtype=torch.bfloat16)
    ours = mixer(AttentionCall(q, k, v, D**-0.5))[0]
    switch(False)
    theirs = mixer(AttentionCall(q, k, v, D**-0.5))[0]
    assert (ours != theirs).float().mean() < 0.01
    round_projections(mixer)
    rounded = mixer(AttentionCall(q, k, v, D**-0.5))[0]
    assert (rounded != theirs).float().mean() > 0.1


def copied(state):
    return {name: x.clone() for name, x in state.items()}


def swapped(mixer):
    mixer.keys.weight.data = mixer.keys.weight.data * 0.5


def replaced(mixer):
    mixer.keys.weight = torch.nn.Parameter(mixer.keys.weight.detach() * 0.5)


def in_place(mixer):
    mixer.keys.weight.mul_(0.5)


def transposed(mixer):
    mixer.keys.weight.data = mixer.keys.weight.data.transpose(1, 2)


def in_bfloat16(mixer):
    mixer.keys.weight.data = mixer.keys.weight.data.bfloat16()


def loaded(mixer):
    mixer.load_state_dict({name: 0.5 * tensor for name, tensor in mixer.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [swapped, replaced, in_place, transposed, in_bfloat16, loaded, copy.deepcopy])
@torch.no_grad()
def test_steps_see_weights_that_change(switch, change):
    """They describe the weights to the op once, and again when these are others."""
    mixer = learned("hedgehog", {}, causal=True, size=24)
    _, state = attend(mixer, *tokens(5, size=24))
    token = tokens(1, size=24)
    decode(mixer, *token, copied(state))
    mixer = change(mixer) or mixer
    if change is copy.deepcopy:
        in_place(mixer)
    found = []
    for on in (True, False):
        switch(on)
        found.append(decode(mixer, *token, copied(state))[0])
    close(*found)


@torch.no_grad()
def test_compiled_steps_leave_it_alone(switch):
    mixer = learned("hedgehog", {}, causal=True)
    _, state = attend(mixer, *tokens(5))
    step = lambda q, k, v, state: decode(mixer, q, k, v, state)[0]  # noqa: E731
    expected = step(*tokens(1), copied(state))
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    close(compiled(*tokens(1), state), expected)


def test_threads_make_no_difference(switch):
    before = torch.get_num_threads()
    mixer = learned("hedgehog", {}, heads=3, key_heads=1)
    inputs = tokens(500, heads=3, key_heads=1)
    one, _ = attend(mixer, *inputs)
    try:
        torch.set_num_threads(4)
        several, _ = attend(mixer, *inputs)
    finally:
        torch.set_num_threads(before)
    close(several, one)


@GROUPS
@pytest.mark.parametrize("scaled", [False, True])
def test_given_features(switch, scaled, key_heads):
    """The bare causal op, against the written-out weights."""
    generator = torch.Generator().manual_seed(5)
    phi_q, phi_k = (torch.rand(2, n, 150, 33, generator=generator) for n in (4, key_heads))
    v = tokens(150, key_heads=key_heads)[2]
    log_scale = 3.0 * torch.randn(2, key_heads, 150, generator=generator) if scaled else None
    mask = padding(150)
    with torch.no_grad():
        ours, state = attend_with_state(phi_q, phi_k, v, key_padding_mask=mask, log_scale=log_scale)
        theirs = naive_attention(phi_q, phi_k, v, causal=True, key_padding_mask=mask, log_scale=log_scale)[0]
        close(ours, theirs)
        first, middle = attend_with_state(
            *(x[:, :, :80] for x in (phi_q, phi_k, v)),
            key_padding_mask=mask[:, :80],
            log_scale=None if log_scale is None else log_scale[..., :80],
        )
        second, after = attend_with_state(
            *(x[:, :, 80:] for x in (phi_q, phi_k, v)),
            key_padding_mask=mask[:, 80:],
            log_scale=None if log_scale is None else log_scale[..., 80:],
            initial_state=middle,
        )
    close(torch.cat([first, second], dim=2), ours)
    close(after.kv, state.kv)


@GROUPS
@pytest.mark.parametrize("climb", [6.0, 60.0, 600.0])
def test_steep_log_scales(switch, climb, key_heads):
    """Rows far below their tile's maximum are as exact as others, and the rows after them change no bit of theirs."""
    generator = torch.Generator().manual_seed(6)
    phi_q, phi_k, v = (torch.rand(1, n, 150, 8, generator=generator) for n in (4, key_heads, key_heads))
    steep = torch.linspace(-climb, climb, 150).expand(1, key_heads, -1).clone()
    with torch.no_grad():
        ours, state = attend_with_state(phi_q, phi_k, v, log_scale=steep)
        theirs = naive_attention(phi_q, phi_k, v, causal=True, log_scale=steep)[0]
        close(ours, theirs)
        for cut in (139, 120, 100):
            steep[..., cut:] = -climb
            flat, _ = attend_with_state(phi_q, phi_k, v, log_scale=steep)
            assert torch.equal(flat[:, :, :cut], ours[:, :, :cut])
        start = State(state.kv, state.log_scale - 2 * climb)
        ours, after = attend_with_state(phi_q, phi_k, v, log_scale=steep, initial_state=start)
        theirs, wanted = causal_attention(phi_q, phi_k, v, log_scale=steep, initial_state=start)
        close(ours, theirs)
        close(after.kv, wanted.kv)


def test_far_angles_and_no_numbers(switch):
    """Sines of large angles come from the C library; what is no number stays none, and stays in its own row."""
    mixer = learned("flexformer_s", PAPER)
    q, k, v = tokens(40)
    far, _ = attend(mixer, q * 1e6, k, v)
    switch(False)
    theirs, _ = attend(mixer, q * 1e6, k, v)
    # Angles of 1e6 are known to 0.1 only: both see the same, so both agree far better than that says.
    assert torch.isfinite(far).all() and far.shape == theirs.shape
    for name, args in (("hedgehog", {}), ("flexformer_s", PAPER), ("flexformer_n", {})):
        mixer = learned(name, args)
        q[0, 0, 7] = float("nan")
        switch(True)
        ours, _ = attend(mixer, q, k, v)
        assert ours[0, 0, 7].isnan().all() and ours.isnan().sum() == V


@torch.no_grad()
@pytest.mark.parametrize("window", [{}, {"window": 6, "sinks": 2}], ids=["kernel", "window"])
def test_keys_of_other_processes_are_read(switch, window):
    """The op left the state of a bidirectional call out without a word."""
    mixer = learned("hedgehog", {}, causal=False, **window)
    whole, cut = tokens(90), 40
    k, v = (x[:, :, cut:] for x in whole[1:])
    features = mixer.map_tokens(k, D**-0.5)
    far = gather_keys(features.phi, v, **mixer.options(AttentionCall(k, k, v, D**-0.5), features.log_scale))
    for on in (True, False):
        switch(on)
        out = mixer(AttentionCall(*(x[:, :, :cut] for x in whole), D**-0.5, state=far._asdict()))[0]
        near = window.get("window", 0) // 2
        close(out[:, :, : cut - near], mixer(AttentionCall(*whole, D**-0.5))[0][:, :, : cut - near])


def test_inputs_it_cannot_read_go_to_pytorch(switch):
    mixer = learned("hedgehog", {}, causal=True)
    q, k, v = tokens(20)
    transposed = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    native = engine()
    assert native.supports(q, k, v)
    assert not native.supports(*transposed)
    for other in (torch.Tensor.double, torch.Tensor.half, lambda x: x.to("meta")):
        assert not native.supports(*map(other, (q, k, v)))
    close(attend(mixer, *transposed)[0], attend(mixer, q, k, v)[0])


def test_agreement(switch):
    rows = agreement()
    assert {row.kernel for row in rows} == set(OPTIONS) and len(rows) == 6 * len(OPTIONS)
    check_agreement(rows)
    assert max(row.error for row in rows) < 1e-5
    with pytest.raises(ValueError, match=r"differs by 5.0e-01.*linearize native --remove"):
        check_agreement([*rows, rows[0]._replace(error=0.5)])
    with pytest.raises(ValueError, match="differs by nan"):
        check_agreement([rows[0]._replace(error=float("nan"))])
