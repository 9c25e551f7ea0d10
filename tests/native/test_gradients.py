"""The native op's gradients equal those of the ops in PyTorch: to q, k, v, the map's weights, given features."""

import itertools
import math

import pytest
import torch
from support.native_cases import CASES, D, V, close, learned, padding, tokens
from support.rounding import allowed, deviation, gradients_in_double

from linearize.attention.backends.causal import attend_causally
from linearize.attention.call import AttentionCall
from linearize.attention.native.gradient import _Native
from linearize.core.errors import ConfigError


def gradients(mixer, count, mask, dtype=torch.float32):
    """Output, then gradients to q, k, v and all parameters."""
    inputs = [x.detach().requires_grad_() for x in tokens(count, dtype=dtype)]
    out, _ = mixer(AttentionCall(*inputs, D**-0.5, mask))
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    # A positive factor of a separate query map cancels, so its parameters are unused.
    idle = not getattr(mixer.config, "tied", True)
    asked = [*inputs, *mixer.parameters()]
    return [out, *torch.autograd.grad(out, asked, towards, allow_unused=idle, materialize_grads=idle)]


def equal(ours, theirs, tolerance=2e-5):
    """Both are sums of some hundred fp32 numbers in another order."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "args"), CASES)
@pytest.mark.sampled("values", "name", "causal")
def test_as_exact_as_fp32_allows(switch, watch, name, args, causal):
    """Native and in PyTorch: both against written-out weights in fp64."""
    calls = watch("gradients")
    mixer = learned(name, args, causal=causal)
    for count, masked in itertools.product((2, 64, 150), (False, True)):
        mask = padding(count) if masked else None
        inputs = tokens(count)
        towards = torch.randn(2, 4, count, V, generator=torch.Generator().manual_seed(7))
        written_out = gradients_in_double(mixer, mask, D**-0.5)
        exact, moves = deviation(written_out, [*inputs, towards, *mixer.parameters()])
        # Projection, scores and their gradient, keys, queries; a weight's gradient: all tokens of the head's queries
        # and keys in the batch of two. No sum is longer.
        terms = D + mixer.feature_dim + V + 2 * count + 2 * 3 * count
        for on in (True, False):
            switch(on)
            found = gradients(mixer, count, mask)
            assert calls == (["gradients"] if on else [])
            calls.clear()
            names = ["out", "q", "k", "v", *(name for name, _ in mixer.named_parameters())]
            for which, ours, wanted, move in zip(names, found, exact, moves, strict=True):
                error = (ours - wanted).abs().max().item()
                assert error <= allowed(move, terms), (which, count, masked, on, error / allowed(move, terms))


@pytest.mark.parametrize("args", [{}, {"activation": "exp"}], ids=["softmax", "exp"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_map_of_the_queries_own(switch, watch, causal, args):
    """It has a separate gradient: queries' weights get no gradient from keys; also with groups of three heads."""
    calls = watch("gradients")
    mixer = learned("hedgehog", {"tied": False} | args, causal=causal, heads=6)
    inputs = [x.detach().requires_grad_() for x in tokens(70, heads=6)]
    found = []
    for on in (True, False):
        switch(on)
        out, _ = mixer(AttentionCall(*inputs, D**-0.5, padding(70)))
        grads = torch.autograd.grad(out.square().sum(), [*inputs, *mixer.parameters()])
        found.append([out, *grads])
    assert calls == ["gradients"]
    equal(*found)


@pytest.mark.parametrize("causal", [False, True])
def test_bfloat16(switch, causal):
    mixer = learned("hedgehog", {}, causal=causal)
    ours = gradients(mixer, 130, None, torch.bfloat16)
    switch(False)
    equal(ours, gradients(mixer, 130, None, torch.bfloat16), 2**-6)


@pytest.mark.parametrize("causal", [False, True])
def test_a_magnitude_at_its_bounds(switch, watch, causal):
    """Keys e^4 and e^-4 times as large as others: weights over a range of e^8, and slopes that are all but zero."""
    calls = watch("gradients")
    mixer = learned("flexformer_n", {}, causal=causal)
    with torch.no_grad():
        mixer.keys.m.mul_(20.0)
    inputs = tokens(150)
    r = mixer.keys.forward_keys(inputs[1]).phi.sum(-1)
    assert r.min() < 1.01 * math.exp(-4) and r.max() > 0.99 * math.exp(4)
    towards = torch.randn(2, 4, 150, V, generator=torch.Generator().manual_seed(7))
    exact, moves = deviation(gradients_in_double(mixer, None, D**-0.5), [*inputs, towards, *mixer.parameters()])
    terms = D + mixer.feature_dim + V + 2 * 150 + 2 * 3 * 150
    found = gradients(mixer, 150, None)
    assert calls == ["gradients"]
    for ours, wanted, move in zip(found, exact, moves, strict=True):
        assert (ours - wanted).abs().max().item() <= allowed(move, terms)


def test_padding_gets_no_gradient(switch):
    mixer = learned("flexformer_s", {"form": "paper", "floor": 0.0})
    q, k, v = (x.detach().requires_grad_() for x in tokens(90))
    mask = torch.arange(90).expand(2, -1) < 60
    out, _ = mixer(AttentionCall(q, k, v, D**-0.5, mask))
    out[:, :, :60].sum().backward()
    for x in (q, k, v):
        assert torch.equal(x.grad[:, :, 60:], torch.zeros_like(x.grad[:, :, 60:]))
        assert x.grad[:, :, :60].abs().min() > 0


@pytest.mark.parametrize("climb", [None, 3.0, 90.0])
def test_given_features(switch, climb):
    """With log-scales, and with such as climb too steeply: those are differentiated by the ops in PyTorch."""
    generator = torch.Generator().manual_seed(5)
    phi_q, phi_k = (torch.rand(2, n, 150, 33, generator=generator) for n in (4, 2))
    scale = None if climb is None else torch.linspace(-climb, climb, 150).expand(2, 2, -1).clone()
    mask = padding(150)
    towards = torch.randn(2, 4, 150, V, generator=generator)
    found = []
    for on in (True, False):
        switch(on)
        leaves = [x.detach().requires_grad_() for x in (phi_q, phi_k, tokens(150)[2], scale) if x is not None]
        out = attend_causally(*leaves[:3], key_padding_mask=mask, log_scale=None if climb is None else leaves[3])
        found.append([out, *torch.autograd.grad(out, leaves, towards)])
    equal(*found)


def in_float64(mixer, q, k, v):
    """Hedgehog's exp form from logarithms of its causal weights; and the gradients to inputs and weights."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *mixer.parameters())]
    q, k, v, weight, bias = leaves
    groups = q.shape[1] // k.shape[1]
    y = [
        torch.einsum("bhtd,hed->bhte", x, weight.repeat_interleave(n, 0)) + bias.repeat_interleave(n, 0)[:, None]
        for x, n in ((q, groups), (k, 1))
    ]
    y_q, y_k = (torch.cat([x, -x], dim=-1) for x in y)
    scores = torch.logsumexp(y_q[:, :, :, None] + y_k.repeat_interleave(groups, 1)[:, :, None], dim=-1)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    out = scores.masked_fill(later, -torch.inf).softmax(-1) @ v.repeat_interleave(groups, 1)
    return [out, *torch.autograd.grad(out.sum(), leaves)]


def test_steep_log_scales_of_a_map(switch):
    """A key 60 times as large leaves few digits to its weights' gradient; natively no fewer than in PyTorch."""
    mixer = learned("hedgehog", {"activation": "exp"}, causal=True)
    inputs = tokens(100)
    inputs[1][:, :, 40] *= 60.0
    errors = []
    for on in (True, False):
        switch(on)
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, _ = mixer(AttentionCall(*leaves, D**-0.5))
        found = [out, *torch.autograd.grad(out.sum(), [*leaves, *mixer.parameters()])]
        pairs = zip(found, in_float64(mixer, *inputs), strict=True)
        errors.append([((one - other).norm() / other.norm()).item() for one, other in pairs])
    for name, ours, theirs in zip(("out", "q", "k", "v", "weight", "bias"), *errors, strict=True):
        assert ours <= 2 * theirs + 1e-6, (name, ours, theirs)
        assert theirs < 5e-3


def test_weights_changed_in_place_are_noticed(switch):
    mixer = learned("hedgehog", {})
    q, k, v = (x.requires_grad_() for x in tokens(20))
    out, _ = mixer(AttentionCall(q, k, v, D**-0.5))
    assert _Native.__name__ in type(out.grad_fn).__name__
    with torch.no_grad():
        mixer.keys.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_training_lowers_the_loss_as_in_pytorch(switch):
    """Twenty steps of Adam through the native op end where those through PyTorch's ops end."""
    ends = []
    for on in (True, False):
        switch(on)
        mixer = learned("flexformer_n", {"form": "damped", "floor": 0.0})
        q, k, v = tokens(60)
        target = torch.randn(2, 4, 60, V, generator=torch.Generator().manual_seed(8))
        optimizer = torch.optim.Adam(mixer.parameters(), lr=1e-2)
        losses = []
        for _ in range(20):
            out, _ = mixer(AttentionCall(q, k, v, D**-0.5))
            loss = (out - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        ends.append(torch.tensor(losses))
    close(*ends, 1e-4)


@pytest.mark.parametrize("window", [None, 8])
def test_second_derivatives_are_refused_and_left_to_the_ops_in_pytorch(switch, window):
    """PyTorch skips its own error if the inputs are reached in another way too: the op's part was missing."""
    mixer = learned("hedgehog", {}, causal=True, window=window)
    inputs = [x.detach().requires_grad_() for x in tokens(20)]

    def twice():
        out = mixer(AttentionCall(*inputs, D**-0.5))[0] + sum(x.mean() ** 2 for x in inputs)
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    with pytest.raises(ConfigError, match="no second derivative; set LINEARIZE_NATIVE=0"):
        twice()
    switch(False)
    assert all(x.isfinite().all() for x in twice())


@pytest.mark.parametrize("window", [None, 8])
def test_transforms_of_torch_func_use_the_ops_in_pytorch(switch, window):
    """They ended in PyTorch's advice to the op's author: override setup_context."""
    mixer, (q, k, v) = learned("hedgehog", {}, causal=True, window=window), tokens(20)

    def loss(*row):
        return mixer(AttentionCall(*(x[None] for x in row), D**-0.5))[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(mixer(AttentionCall(*leaves, D**-0.5))[0].square().sum(), leaves)
    equal(found, expected)
