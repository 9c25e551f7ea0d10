"""The blockwise loss equals the written-out one: value and gradients."""

import pytest
import torch
from support.tiny import converted
from support.weights_loss import weights_loss

import linearize.training.stage_one.loss as loss_module
from linearize.attention.interface import linear_attentions
from linearize.ops import Mapped, Window, kernel_weights, window_weights
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_one.loss import KNEE, Targets, output_loss
from linearize.training.stage_one.observer import layer_loss


def make(*, causal, padded, scaled, signed, tokens=37, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    q, k = draw(2, 4, tokens, 6), draw(2, 2, tokens, 6)
    phi_q, phi_k = draw(2, 4, tokens, 5), draw(2, 2, tokens, 5)
    if signed:
        phi_q, phi_k = 0.5 * phi_q + 0.6, 0.5 * phi_k + 0.6
        # The first token of a causal row sees itself only: its product has to be positive for a finite loss.
        phi_q[:, :, 0], phi_k[:, :, 0] = 1.0, 1.0
    else:
        phi_q, phi_k = phi_q.abs() + 0.1, phi_k.abs() + 0.1
    scale = (3 * draw(2, 2, tokens)).requires_grad_() if scaled else None
    mask = None
    if padded:
        mask = torch.ones(2, tokens)
        mask[0, 30:] = 0
        mask[1, :4] = 0
    return phi_q.requires_grad_(), phi_k.requires_grad_(), scale, Targets(q, k, 0.4, causal, mask)


def softmax_weights(targets):
    scores = targets.q @ targets.k.repeat_interleave(2, dim=1).transpose(-1, -2) * targets.scaling
    tokens = scores.shape[-1]
    visible = torch.ones(tokens, tokens, dtype=torch.bool)
    if targets.causal:
        visible = visible.tril()
    visible = visible.expand(2, 1, tokens, tokens)
    if targets.key_padding_mask is not None:
        visible = visible & targets.key_padding_mask[:, None, None].bool()
    return scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)


def naive_positive(phi_q, phi_k, scale, targets):
    weights = kernel_weights(
        phi_q, phi_k, key_padding_mask=targets.key_padding_mask, log_scale=scale, causal=targets.causal
    )
    losses = -(softmax_weights(targets) * weights.clamp(min=1e-30).log()).sum(-1)
    valid = targets.valid_queries()
    return (losses if valid is None else losses * valid[:, None]).sum()


def check_equal(got, want, leaves):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    for one, other in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks even at test sizes."""
    monkeypatch.setattr(loss_module, "CPU_NUMBERS", 2 * 37 * 8)
    monkeypatch.setattr(loss_module, "LEAST_ROWS", 1)
    monkeypatch.setattr(loss_module, "CAUSAL_ROWS", 4)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_positive_loss_equals_naive(causal, padded, scaled):
    phi_q, phi_k, scale, targets = make(causal=causal, padded=padded, scaled=scaled, signed=False)
    leaves = [x for x in (phi_q, phi_k, scale) if x is not None]
    got = weights_loss(phi_q, phi_k, scale, targets)
    check_equal(got, naive_positive(phi_q, phi_k, scale, targets), leaves)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_a_part_that_is_not_full_counts_too(causal, heads, monkeypatch):
    """Of four pairs of a row and a key head, so many are walked at once."""
    phi_q, phi_k, scale, targets = make(causal=causal, padded=False, scaled=True, signed=False)
    monkeypatch.setattr(loss_module, "CPU_NUMBERS", heads * 2 * 37 * 37)
    monkeypatch.setattr(loss_module, "CAUSAL_ROWS", 37)
    got = weights_loss(phi_q, phi_k, scale, targets)
    check_equal(got, naive_positive(phi_q, phi_k, scale, targets), [phi_q, phi_k, scale])


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_signed_loss_equals_naive(causal, scaled):
    penalty = 0.7
    phi_q, phi_k, scale, targets = make(causal=causal, padded=False, scaled=scaled, signed=True)
    scores = kernel_weights(phi_q, phi_k, log_scale=scale, causal=causal, normalize=False)
    target = softmax_weights(targets)
    z = scores.clamp(min=0).sum(-1, keepdim=True)
    keys = torch.arange(1.0, 38.0)[:, None] if causal else torch.full((37, 1), 37.0)
    assert (z > 0).all()
    assert (scores < 0).any()
    least = KNEE * scores.abs().sum(-1, keepdim=True).detach()
    assert (z > least).all()
    knee = least / keys
    above = scores > knee
    logs = torch.where(above, scores.clamp(min=1e-38), knee).log() + torch.where(above, 0.0, (scores - knee) / knee)
    losses = z.clamp(min=1e-30).log() - (target * logs).sum(-1, keepdim=True)
    losses = losses + penalty * (-scores).clamp(min=0).sum(-1, keepdim=True) / z.clamp(min=1e-30)
    leaves = [x for x in (phi_q, phi_k, scale) if x is not None]
    got = weights_loss(phi_q, phi_k, scale, targets, negative_penalty=penalty)
    check_equal(got, losses.sum(), leaves)


def test_sampled_queries_are_the_same_rows():
    phi_q, phi_k, scale, targets = make(causal=True, padded=True, scaled=True, signed=False)
    picked = torch.tensor([0, 3, 11, 29, 36])
    sampled = targets._replace(q=targets.q[:, :, picked], positions=picked)
    got = weights_loss(phi_q[:, :, picked], phi_k, scale, sampled)
    keep = torch.zeros(37).index_fill(0, picked, 1.0)
    weights = kernel_weights(phi_q, phi_k, key_padding_mask=targets.key_padding_mask, log_scale=scale, causal=True)
    losses = -(softmax_weights(targets) * weights.clamp(min=1e-30).log()).sum(-1)
    want = (losses * targets.valid_queries()[:, None] * keep).sum()
    check_equal(got, want, [phi_q, phi_k, scale])
    assert sampled.size() == targets.key_padding_mask[:, picked].sum().item() * 4


def test_output_loss_is_relative_and_ignores_padding():
    *_, targets = make(causal=False, padded=True, scaled=False, signed=False)
    target = torch.randn(2, 4, 37, 6)
    spoiled = target * 1.1
    loss = output_loss(spoiled, target, targets) / targets.size()
    assert loss.item() == pytest.approx(0.01, rel=1e-3)
    spoiled[0, :, 30:] = 1e6
    assert (output_loss(spoiled, target, targets) / targets.size()).item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(("sinks", "exact_keys"), [(0, 0), (3, 0), (0, 4), (3, 4)])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_the_loss_beside_a_window_equals_naive(causal, padded, sinks, exact_keys):
    phi_q, phi_k, scale, targets = make(causal=causal, padded=padded, scaled=True, signed=False)
    row_scale = torch.randn(2, 4, 37, generator=torch.Generator().manual_seed(1)).requires_grad_()
    window = Window(5, targets.scaling, causal, sinks=sinks, exact_keys=exact_keys)
    got = weights_loss(phi_q, phi_k, scale, targets, window=window, query_scale=row_scale)
    sides = Mapped(targets.q, phi_q, row_scale), Mapped(targets.k, phi_k, scale)
    weights = window_weights(*sides, window, key_padding_mask=targets.key_padding_mask)
    losses = -(softmax_weights(targets) * weights.clamp(min=1e-30).log()).sum(-1)
    valid = targets.valid_queries()
    want = (losses if valid is None else losses * valid[:, None]).sum()
    check_equal(got, want, [phi_q, phi_k, scale, row_scale])


def test_sampled_queries_beside_a_window_are_the_same_rows():
    phi_q, phi_k, scale, targets = make(causal=True, padded=True, scaled=True, signed=False)
    picked = torch.tensor([0, 3, 11, 29, 36])
    sampled = targets._replace(q=targets.q[:, :, picked], positions=picked)
    window = Window(5, targets.scaling, True, sinks=2, exact_keys=3)
    got = weights_loss(phi_q[:, :, picked], phi_k, scale, sampled, window=window)
    sides = Mapped(targets.q, phi_q), Mapped(targets.k, phi_k, scale)
    weights = window_weights(*sides, window, key_padding_mask=targets.key_padding_mask)
    losses = -(softmax_weights(targets) * weights.clamp(min=1e-30).log()).sum(-1)
    keep = torch.zeros(37).index_fill(0, picked, 1.0)
    check_equal(got, (losses * targets.valid_queries()[:, None] * keep).sum(), [phi_q, phi_k, scale])


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("signed", [False, True], ids=["positive", "signed"])
def test_later_keys_of_any_size_change_nothing_before(window, signed):
    """Rows that share a block with keys of far larger log-scales have the loss and gradient of the keys they see."""
    if signed and window:
        pytest.skip("a window joins positive maps only")
    phi_q, phi_k, scale, targets = make(causal=True, padded=False, scaled=True, signed=signed)
    options = {"negative_penalty": 0.7 if signed else None}
    options |= {"window": Window(window, targets.scaling, True)} if window else {}
    cut, rest = 18, torch.arange(18, 37)
    large = scale + torch.where(torch.arange(37) < cut, 0.0, 150.0)
    whole = weights_loss(phi_q, phi_k, large, targets, **options)
    first = targets._replace(q=targets.q[:, :, :cut], k=targets.k[:, :, :cut])
    before = weights_loss(phi_q[:, :, :cut], phi_k[:, :, :cut], scale[:, :, :cut], first, **options)
    after = weights_loss(phi_q[:, :, cut:], phi_k, large, targets.sampled(rest), **options)
    check_equal(whole, before + after, [phi_q, phi_k, scale])


def test_the_loss_by_default_is_what_a_hybrid_can_match():
    """With scales a kernel joined with a window has softmax's size and matches weights; without them, outputs."""
    kinds = {}
    for hybrid in ({}, {"window": 4}, {"window": 4, "scale": "none"}, {"window": 4, "softmax_heads": {0: [1]}}):
        model = converted("llama", "AutoModelForCausalLM", "hedgehog", **hybrid)
        layer = next(iter(linear_attentions(model).values()))
        loss = layer_loss("first", layer, DistillConfig())
        kinds[str(hybrid)] = "weights" if loss.weights else "output"
    assert list(kinds.values()) == ["weights", "weights", "output", "weights"]
