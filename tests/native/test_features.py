"""Maps by themselves through the native op equal the maps in PyTorch: features, log-scales, gradients, stage one."""

import pytest
import torch
from support.native_cases import CASES, D, close, learned, tokens

from linearize.attention.native import engine


def weights(mixer, count, *, dtype=torch.float32, **shape):
    """What stage one makes of features, the unscaled weights exp(log-scale) phi(q) phi(k), and its gradients."""
    q, k, _ = (x.requires_grad_() for x in tokens(count, dtype=dtype, **shape))
    (phi_q, _), (phi_k, scale) = mixer.mapped(q, k, scaling=D**-0.5)
    phi_k = phi_k.repeat_interleave(phi_q.shape[1] // phi_k.shape[1], dim=1)
    scores = phi_q @ phi_k.transpose(-1, -2)
    if scale is not None:
        shift = scale.amax(dim=-1, keepdim=True).detach()
        scores = scores * (scale - shift).exp().repeat_interleave(scores.shape[1] // scale.shape[1], 1)[:, :, None]
    # A query's length is free: the direction counts.
    scores = scores / scores.norm(dim=-1, keepdim=True)
    towards = torch.randn(scores.shape, generator=torch.Generator().manual_seed(8))
    grads = torch.autograd.grad((scores * towards).sum(), [q, k, *mixer.parameters()], materialize_grads=True)
    return phi_q, phi_k, scale, scores, grads


@pytest.mark.parametrize("count", [1, 15, 64, 130])
@pytest.mark.parametrize(("name", "args"), CASES)
@pytest.mark.sampled("values")
def test_equal_the_maps_in_pytorch(switch, watch, name, args, count):
    calls = watch("features", "features_gradient")
    mixer = learned(name, args)
    switch(True)
    *ours, grads = weights(mixer, count)
    assert calls == ["features"] * 2 + ["features_gradient"] * 2
    switch(False)
    *theirs, wanted = weights(mixer, count)
    assert len(calls) == 4
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            close(one, other)
    names = ["q", "k", *(name for name, _ in mixer.named_parameters())]
    for which, one, other in zip(names, grads, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        if which == "queries.m":
            # A query's magnitude cancels: of as much as the keys have, nothing is left but rounding.
            most = 1e-6 * wanted[names.index("keys.m")].norm() + 1e-6
            assert one.norm() <= most and other.norm() <= most
            continue
        # Both are sums of some thousand fp32 numbers in another order; nearly nothing where one key is all there is.
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-6


def test_bfloat16_goes_in_and_fp32_comes_out(switch):
    mixer = learned("hedgehog", {})
    *ours, grads = weights(mixer, 70, dtype=torch.bfloat16)
    switch(False)
    *theirs, wanted = weights(mixer, 70, dtype=torch.bfloat16)
    assert ours[0].dtype == torch.float32 and grads[0].dtype == torch.bfloat16
    # PyTorch rounds nothing between q and the features either; their gradient to q is rounded once.
    close(ours[0], theirs[0])
    for one, other in zip(grads, wanted, strict=True):
        assert (one.float() - other.float()).norm() <= 2**-8 * other.float().norm()


def test_weights_changed_in_place_are_noticed(switch):
    mixer = learned("luna", {})
    q, k, _ = tokens(20)
    (phi, _), _ = mixer.mapped(q, k, scaling=D**-0.5)
    with torch.no_grad():
        mixer.keys.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        phi.sum().backward()


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e6])
@pytest.mark.parametrize("magnitude", [False, True])
@torch.no_grad()
def test_positive_features_are_none_below_zero(switch, scale, magnitude):
    """Where the sine is 1 up to rounding, too; and beyond the angles that the fast sine takes. They add up to the
    magnitude, which has its bounds.
    """
    mixer = learned("flexformer_n", {"frequencies": 64, "magnitude": magnitude})
    x = scale * torch.randn(2, 2, 3000, D, generator=torch.Generator().manual_seed(9))
    phi, _ = engine().features(mixer.keys.map_spec(), x, scale=1.0)
    assert (phi >= 0).all() and torch.isfinite(phi).all()
    if not magnitude:
        torch.testing.assert_close(phi.sum(-1), torch.ones(phi.shape[:-1]))
        return
    y = x.double() @ mixer.keys.m.double()[:, :, None]
    wanted = (4 * (y[..., 0] / 4).tanh()).exp()
    # An error of y is one of the logarithm.
    torch.testing.assert_close(phi.sum(-1).double(), wanted, rtol=2e-6 * max(1.0, min(scale, 30.0)), atol=0)
    assert wanted.max() > 50 or scale == 1.0
