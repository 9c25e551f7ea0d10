"""Softmax windows joined to feature maps: fast = written out, forward and gradients; prefill = decode; linear in T."""

import functools
import heapq
import math

import pytest
import torch

from linearize.ops import Mapped, Unmapped, Window, window_attention, window_causal, window_weights
from linearize.ops.state import real_first, real_tokens, take, without_padding
from linearize.ops.window_parts import pick, strongest

BATCH, HEADS, KEY_HEADS, DIM, FEATURES, WIDTH = 2, 4, 2, 5, 6, 3
SCALING = DIM**-0.5


def make(tokens, *, scaled=True, signed=False, padded=None, size=1.0, seed=0):
    """Random features, queries, keys and values of one call, and the options that belong to them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads, *shape):
        return torch.randn(BATCH, heads, tokens, *shape, generator=generator)

    sign = (lambda x: x) if signed else torch.abs
    inputs = [
        sign(draw(HEADS, FEATURES)),
        sign(draw(KEY_HEADS, FEATURES)),
        draw(HEADS, DIM) * size,
        draw(KEY_HEADS, DIM) * size,
        draw(KEY_HEADS, WIDTH),
    ]
    if signed:
        # Away from zero denominators, where two ways of rounding differ without bound.
        inputs[0], inputs[1] = (torch.cat([x[..., 1:], torch.full_like(x[..., :1], 4.0)], -1) for x in inputs[:2])
    options = {}
    if scaled:
        options = {"query_log_scale": draw(HEADS) * 8 * size, "log_scale": draw(KEY_HEADS) * 8 * size}
    leaves = [x.requires_grad_() for x in [*inputs, *options.values()]]
    if padded is not None:
        mask = torch.ones(BATCH, tokens, dtype=torch.bool)
        cut = tokens // 3
        if padded == "holes":
            mask[0, cut : 2 * cut] = False
            mask[1, ::3] = False
        else:
            mask[0, slice(0, cut) if padded == "left" else slice(tokens - cut, tokens)] = False
        options["key_padding_mask"] = mask
    return inputs, options, leaves


def sides(phi_q, phi_k, q, k, query_log_scale=None, log_scale=None):
    """Queries and keys as the op takes them."""
    return Mapped(q, phi_q, query_log_scale), Mapped(k, phi_k, log_scale)


def attend(*inputs, window, scaling, causal, key_padding_mask=None, sinks=0, exact_keys=0, **scales):
    """Output and state of the op."""
    form = Window(window, scaling, causal, sinks=sinks, exact_keys=exact_keys)
    return window_attention(*sides(*inputs[:4], **scales), inputs[4], form, key_padding_mask=key_padding_mask)


def in_pieces(inputs, options, cuts, *, window, **more):
    """Output of the op in pieces of the tokens, and all states; after the first, keys are mapped by their places."""
    (phi_q, phi_k, q, k, v), mask, form = inputs, options.get("key_padding_mask"), Window(window, **more)
    real = real_tokens(k, mask)
    places, order, outputs, states = (real.cumsum(dim=1) - 1).clamp(min=0), real_first(real), [], [None]
    tokens, features, scales = (take(x, order) for x in (without_padding(k, mask), phi_k, options["log_scale"]))

    def mapped(live, keys, at):
        at = at.long() if at.ndim == 3 else at[:, None].expand(-1, KEY_HEADS, -1)
        same = (keys == pick(tokens, at)) | (keys == 0)
        assert same[live].all(), "these keys do not have these places"
        return pick(features, at), pick(scales, at)

    for part in cuts:
        queries = Mapped(q[:, :, part], phi_q[:, :, part], options["query_log_scale"][:, :, part])
        # Nothing leaves the window of a row that gets no token.
        keys = Unmapped(k[:, :, part], functools.partial(mapped, real[:, part].any(dim=1)), places[:, part])
        if states[-1] is None:
            keys = Mapped(k[:, :, part], phi_k[:, :, part], options["log_scale"][:, :, part], places[:, part])
        given = {"key_padding_mask": None if mask is None else mask[:, part], "initial_state": states[-1]}
        out, state = window_attention(queries, keys, v[:, :, part], form, **given)
        outputs.append(out)
        states.append(state)
    return torch.cat(outputs, dim=2), states[1:]


def weights_of(*inputs, window, scaling, causal, key_padding_mask=None, sinks=0, exact_keys=0, **scales):
    """The weights, written out."""
    form = Window(window, scaling, causal, sinks=sinks, exact_keys=exact_keys)
    return window_weights(*sides(*inputs, **scales), form, key_padding_mask=key_padding_mask)


def reference(inputs, options, **more):
    weights = weights_of(*inputs[:4], **options, **more)
    return weights @ inputs[4].repeat_interleave(HEADS // KEY_HEADS, dim=1)


def gradients(out, leaves, mask=None):
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    out = out if mask is None else out * mask[:, None, :, None]
    return torch.autograd.grad((out * weights).sum(), leaves)


@pytest.mark.parametrize("signed", [False, True], ids=["positive", "signed"])
@pytest.mark.parametrize("padded", [None, "left", "right", "holes"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("sinks", [0, 1, 4, 40])
@pytest.mark.parametrize(("tokens", "window"), [(1, 4), (9, 1), (33, 2), (63, 5), (100, 8), (70, 64), (20, 200)])
@pytest.mark.sampled("pairs")
def test_forward_and_gradients_equal_naive(tokens, window, sinks, causal, padded, signed):
    if padded and tokens == 1:
        pytest.skip("one token has no padding")
    made = make(tokens, padded=padded, signed=signed)
    check_equals_naive(*made, window=window, scaling=SCALING, causal=causal, sinks=sinks)


def check_equals_naive(inputs, options, leaves, **more):
    """Output and gradients of the op equal those of the written-out weights."""
    (fast, _), slow = attend(*inputs, **options, **more), reference(inputs, options, **more)
    mask = options.get("key_padding_mask")
    real = slice(None) if mask is None else mask[:, None].expand(-1, HEADS, -1)
    torch.testing.assert_close(fast[real], slow[real], rtol=1e-3, atol=1e-4)
    for got, want in zip(gradients(fast, leaves, mask), gradients(slow, leaves, mask), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("window", [1, 2, 5, 6])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_which_weights_are_softmax(causal, window, sinks):
    """The definition, entry by entry: near keys exp(score), far keys the kernel, one denominator."""
    tokens = 14
    inputs, options, _ = make(tokens)
    more = {"window": window, "scaling": SCALING, "causal": causal, "sinks": sinks}
    weights = weights_of(*inputs[:4], **options, **more).detach()
    phi_q, phi_k, q, k = (x.detach().double() for x in inputs[:4])
    a, c = (options[name].detach().double() for name in ("query_log_scale", "log_scale"))
    for b, h, i in [(0, 0, 0), (0, 3, 7), (1, 2, tokens - 1)]:
        row = torch.zeros(tokens, dtype=torch.float64)
        for j in range(tokens):
            near = j < sinks or (i - j < window if causal else abs(i - j) <= window // 2)
            far = torch.exp(a[b, h, i] + c[b, h // 2, j]) * (phi_q[b, h, i] @ phi_k[b, h // 2, j])
            row[j] = torch.exp(SCALING * q[b, h, i] @ k[b, h // 2, j]) if near else far
            if causal and j > i:
                row[j] = 0.0
        torch.testing.assert_close(weights[b, h, i].double(), row / row.sum(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_a_window_over_everything_is_softmax(causal):
    (phi_q, phi_k, q, k, v), options, _ = make(23)
    out, _ = attend(phi_q, phi_k, q, k, v, **options, window=60, scaling=SCALING, causal=causal)
    wide = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(q, *wide, is_causal=causal, scale=SCALING)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [None, "left", "holes"])
@pytest.mark.parametrize("prefill", [0, 1, 3, 11, 30])
@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("sinks", [0, 2, 9])
@pytest.mark.sampled("pairs")
def test_prefill_and_decode_equal_at_once(window, sinks, prefill, padded):
    tokens = 40
    inputs, options, _ = make(tokens, padded=padded)
    more = {"window": window, "scaling": SCALING, "causal": True, "sinks": sinks}
    whole, _ = attend(*inputs, **options, **more)
    cuts = [slice(0, prefill), slice(prefill, prefill + 5), *(slice(i, i + 1) for i in range(prefill + 5, tokens))]
    out, states = in_pieces(inputs, options, cuts[prefill == 0 :], **more)
    mask = options.get("key_padding_mask")
    real = slice(None) if mask is None else mask[:, None].expand(-1, HEADS, -1)
    torch.testing.assert_close(out[real], whole[real], rtol=1e-3, atol=1e-4)
    # Sums, and keys and values without features: nothing grows.
    numbers = KEY_HEADS * (FEATURES * (WIDTH + 1) + 1 + (window + sinks) * (DIM + WIDTH)) + window + (sinks > 0)
    assert {sum(x.numel() for x in state.present().values()) for state in states} == {BATCH * numbers}


def test_no_future_token_changes_an_earlier_output():
    inputs, options, _ = make(90)
    more = {"window": 6, "scaling": SCALING, "causal": True}
    early = attend(*inputs, **options, **more)[0][:, :, :50]
    far = torch.where(torch.arange(90) < 50, 1.0, 30.0)
    pushed = {name: x * far for name, x in options.items()}
    late = attend(*(x * far[:, None] for x in inputs), **pushed, **more)[0][:, :, :50]
    torch.testing.assert_close(late, early, rtol=0, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("low", [-400.0, 0.0, 400.0])
def test_parts_of_very_different_size_stay_finite(causal, low):
    """Where one part is e^400 times the other, the output is that of the larger, not 0 / 0."""
    (phi_q, phi_k, q, k, v), options, leaves = make(50)
    shifted = {"query_log_scale": options["query_log_scale"] + low, "log_scale": options["log_scale"]}
    more = {"window": 5, "scaling": SCALING, "causal": causal}
    out, _ = attend(phi_q, phi_k, q, k, v, **shifted, **more)
    torch.testing.assert_close(out, reference((phi_q, phi_k, q, k, v), shifted, **more), rtol=1e-3, atol=1e-4)
    assert all(torch.isfinite(g).all() for g in gradients(out, leaves))
    scores, _ = attend(phi_q * 0, phi_k, q * 0 - 40, k * 0 + 40, v, **more)
    assert torch.isfinite(scores).all()
    near, _ = attend(phi_q * 0, phi_k, q * 0, k, v, **more)
    torch.testing.assert_close(scores, near, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_an_all_padded_row_is_finite(causal):
    inputs, options, leaves = make(12)
    mask = torch.ones(BATCH, 12)
    mask[0] = 0
    out, _ = attend(*inputs, **options, key_padding_mask=mask, window=4, scaling=SCALING, causal=causal)
    assert torch.isfinite(out).all()
    assert (out[0] == 0).all()
    assert all(torch.isfinite(g).all() for g in gradients(out, leaves))


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_memory_is_linear_in_the_length(causal):
    """The largest tensor made on the way grows with T, not with its square."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor):
                    self.numbers = max(self.numbers, x.untyped_storage().nbytes())
            return out

    def largest(tokens):
        inputs, options, _ = make(tokens)
        with torch.no_grad(), Largest() as seen:
            attend(*inputs, **options, window=32, scaling=SCALING, causal=causal)
        return seen.numbers

    assert largest(2048) <= 4.2 * largest(512)


@pytest.mark.parametrize("causal", [True, False])
def test_a_part_that_counts_as_absent_has_no_gradient_either(causal):
    """Features whose products nearly vanish, under scales that nearly overflow: fp32 cannot hold their sums."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3))
    phi_q, phi_k = (torch.full((1, 2, 9, 3), 1e-16, requires_grad=True) for _ in range(2))
    scale_q, scale_k = (torch.full((1, 2, 9), 100.0, requires_grad=True) for _ in range(2))
    window = Window(3, 0.5, causal)
    out, _ = window_attention(Mapped(q, phi_q, scale_q), Mapped(k, phi_k, scale_k), v, window)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    near = (distance >= 0) & (distance < 3) if causal else distance.abs() <= 1
    expected = ((q @ k.mT * 0.5).masked_fill(~near, -torch.inf)).softmax(dim=-1) @ v
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out.sin().sum(), [q, k, v, phi_q, phi_k, scale_q, scale_k])
    for ours, theirs in zip(found, torch.autograd.grad(expected.sin().sum(), [q, k, v]), strict=False):
        torch.testing.assert_close(ours, theirs)
    assert all(not one.any() for one in found[3:])


@pytest.mark.parametrize("padded", [None, "left", "right", "holes"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(("sinks", "exact_keys"), [(0, 1), (0, 7), (3, 4), (2, 200)])
@pytest.mark.parametrize(("tokens", "window"), [(1, 4), (9, 1), (33, 2), (100, 8), (130, 40), (20, 200)])
@pytest.mark.sampled("pairs")
def test_exact_keys_equal_naive(tokens, window, sinks, exact_keys, causal, padded):
    if padded and tokens == 1:
        pytest.skip("one token has no padding")
    made = make(tokens, padded=padded)
    check_equals_naive(*made, window=window, scaling=SCALING, causal=causal, sinks=sinks, exact_keys=exact_keys)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_which_keys_are_exact(causal):
    """By the definition, one query at a time: the keys of largest log-scale among those outside the window."""
    tokens, window, sinks, slots = 40, 5, 2, 3
    inputs, options, _ = make(tokens)
    more = {"window": window, "scaling": SCALING, "causal": causal, "sinks": sinks}
    weights = weights_of(*inputs[:4], **options, **more, exact_keys=slots).detach().double()
    phi_q, phi_k, q, k = (x.detach().double() for x in inputs[:4])
    a, c = (options[name].detach().double() for name in ("query_log_scale", "log_scale"))
    for b, h, i in [(0, 0, 39), (0, 3, 20), (1, 2, 8), (1, 1, 0)]:
        keys = range(i + 1) if causal else range(tokens)
        gone = [j for j in keys if j >= sinks and (not causal or i - j >= window)]
        kept = sorted(gone, key=lambda j: (-float(c[b, h // 2, j]), j))[:slots]
        row = torch.zeros(tokens, dtype=torch.float64)
        for j in keys:
            near = j in kept or j < sinks or (i - j < window if causal else abs(i - j) <= window // 2)
            far = torch.exp(a[b, h, i] + c[b, h // 2, j]) * (phi_q[b, h, i] @ phi_k[b, h // 2, j])
            row[j] = torch.exp(SCALING * q[b, h, i] @ k[b, h // 2, j]) if near else far
        torch.testing.assert_close(weights[b, h, i], row / row.sum(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("first", [1, 4, 25, 50])
def test_exact_keys_go_on_from_a_state(first, sinks):
    tokens, window, slots = 60, 6, 4
    inputs, options, _ = make(tokens, padded="holes")
    more = {"window": window, "scaling": SCALING, "causal": True, "sinks": sinks, "exact_keys": slots}
    whole, last = attend(*inputs, **options, **more)
    cuts = (slice(0, first), slice(first, first + 9), *(slice(i, i + 1) for i in range(first + 9, tokens)))
    out, (*_, state) = in_pieces(inputs, options, cuts, **more)
    real = options["key_padding_mask"][:, None].expand(-1, HEADS, -1)
    torch.testing.assert_close(out[real], whole[real], rtol=1e-3, atol=1e-4)
    assert state.kept_k.shape[2] == slots and bool(state.kept_mask.all())
    # The same keys are kept; a heap may hold them in another order.
    torch.testing.assert_close(state.kept_scale.sort(dim=-1).values, last.kept_scale.sort(dim=-1).values)


def heaps(priority, there, slots, every):
    """The contest by its definition, one head and one step after the other."""
    batch, heads, count = priority.shape
    steps = count - slots
    values, real = window_causal.ranks(priority).tolist(), there.tolist()
    losers, losts, kept = [], [], []
    for row, exists in ((values[b][h], real[b]) for b in range(batch) for h in range(heads)):
        heap = [(row[j], -j) for j in range(slots) if exists[j]]
        heapq.heapify(heap)
        lost, loser = [steps if exists[j] else 0 for j in range(count)], [-1] * steps
        for step in range(steps):
            j = slots + step
            if exists[j] and len(heap) < slots:
                heapq.heappush(heap, (row[j], -j))
            elif exists[j]:
                loser[step] = out = -heapq.heappushpop(heap, (row[j], -j))[1]
                lost[out] = step
            if step % every == 0 or step == steps - 1:
                places = sorted(-j for _, j in heap)
                kept.append(places + [-1] * (slots - len(places)))
        losers.append(loser)
        losts.append(lost)
    losers, losts = (torch.tensor(x).view(batch, heads, -1) for x in (losers, losts))
    kept = torch.tensor(kept).view(batch, heads, -1, slots)
    return losers.clamp(min=0), losers[:, 0] >= 0, losts, kept.clamp(min=0), kept[:, 0] >= 0


def test_the_contest_is_that_of_heaps():
    """With equal priorities, NaN, missing candidates, and parts of several sizes."""
    generator = torch.Generator().manual_seed(0)

    def draw(most: int) -> int:
        return int(torch.randint(1, most, (1,), generator=generator))

    for trial in range(60):
        slots, steps, every = draw(6), draw(30), draw(9)
        priority = torch.randint(0, 6, (2, 3, slots + steps), generator=generator).float()
        if trial % 3 == 0:
            priority[0, 0, 0] = torch.nan
        there = torch.rand(2, slots + steps, generator=generator) > 0.3
        wanted = heaps(priority, there, slots, every)
        found = window_causal.contest(priority, there, slots, every)
        assert torch.equal(found.loser * found.has_loser[:, None], wanted[0] * wanted[1][:, None])
        assert all(torch.equal(one, two) for one, two in zip(found[1:], wanted[1:], strict=True))
        # As traced graphs compute it: the last places may be there twice.
        graph = window_causal.contest_at_once(window_causal.ranks(priority), there, slots, every)
        assert all(torch.equal(one, two) for one, two in zip(graph[:3], found[:3], strict=True))
        count = found.kept.shape[2]
        for one, two in ((graph.kept, found.kept), (graph.is_kept.unsqueeze(1), found.is_kept.unsqueeze(1))):
            assert torch.equal(one[:, :, :count], two) and torch.equal(one[:, :, -1], two[:, :, -1])


def test_the_strongest_are_the_first_of_a_sorted_list():
    """With equal priorities, NaN (the weakest) and infinity, and fewer candidates than places: no other key is one."""
    generator = torch.Generator().manual_seed(1)
    choices = torch.tensor([torch.nan, -torch.inf, -1.0, 0.0, 0.0, 2.0, torch.inf])
    for slots in (1, 3, 6):
        priority = choices[torch.randint(0, len(choices), (20, 9), generator=generator)]
        candidates = torch.rand(20, 9, generator=generator) > 0.4
        found = strongest(priority, candidates, slots)
        for values, real, got in zip(priority.tolist(), candidates.tolist(), found, strict=True):
            weakest_last = [-math.inf if math.isnan(x) else x for x in values]
            wanted = sorted((j for j in range(9) if real[j]), key=lambda j: (-weakest_last[j], j))[:slots]
            assert got.nonzero()[:, 0].tolist() == sorted(wanted)
