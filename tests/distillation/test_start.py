"""Log-scales in closed form: exact where scales can be exact, and kept only where the held-out loss falls."""

import pytest
import torch
from support.training import Fixed, batches, sharp

from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.attention.shape import HeadShape
from linearize.core.registry import Hybrid
from linearize.fidelity.teacher import pieces
from linearize.training.stage_one import DistillConfig, start
from linearize.training.stage_one.loop import distill
from linearize.training.stage_one.loss import Targets
from linearize.training.stage_one.observer import layer_loss
from linearize.training.stage_one.start import fit_scales


def layer_and_targets(*, causal, padded=False, tokens=40, **hybrid):
    shape = HeadShape(4, 2, 6, 6, causal)
    layer = LinearAttention("hedgehog", {}, shape, Hybrid(4, 1, **{"scale": "linear", **hybrid})).eval()
    layer.reset_parameters(0)
    draw = torch.Generator().manual_seed(1)
    q, k = (torch.randn(3, heads, tokens, 6, generator=draw) for heads in (4, 2))
    mask = torch.ones(3, tokens, dtype=torch.bool)
    mask[0, 31:], mask[1, :7] = False, False
    return layer, Targets(q, k, 0.6, causal, mask if padded else None)


def scales(layer):
    return layer.mixer.query_scale.weight, layer.mixer.query_scale.bias, layer.mixer.key_scale.weight


def stir(layer, seed=2):
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in scales(layer):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=draw))


each_kind = pytest.mark.parametrize(
    ("causal", "padded"), [(False, False), (True, False), (True, True)], ids=["both sides", "causal", "padded"]
)


@each_kind
@pytest.mark.parametrize("more", [{}, {"exact_keys": 3}, {"routed_blocks": "2:2"}], ids=["window", "exact", "routed"])
@pytest.mark.parametrize("most", [1024, 10], ids=["all", "some"])
@torch.no_grad()
def test_blocks_are_the_layers_weights(causal, padded, more, most, monkeypatch):
    """In rows of at least twice `QUERIES` tokens, they are those of every n-th query."""
    monkeypatch.setattr(start, "SMALL", 0.0)
    monkeypatch.setattr(start, "QUERIES", most)
    layer, targets = layer_and_targets(causal=causal, padded=padded, **more)
    stir(layer)
    weights = layer.mixer.weights(targets.q, targets.k, scaling=0.6, key_padding_mask=targets.key_padding_mask)
    wanted = [
        weights if batch is None else weights[batch][:, :, tokens][..., tokens]
        for batch, tokens in pieces(targets.key_padding_mask)
    ]
    rows = []
    for _, keys, scores, products, total in start._blocks(layer, targets, layer.mixer.form(0.6)):
        far = products.exp()
        near = total.exp() - scores.exp().sum(dim=-1, keepdim=True)
        # Window and sink hold 5 keys; the first of both sides' queries has half a window, with the sink in it.
        held = (5 if causal else 3) + more.get("exact_keys", 0)
        # Queries that look up less than two whole blocks hold fewer keys than others.
        assert most == 10 or "routed_blocks" in more or int((far > 0).sum(dim=-1).max()) == keys.shape[2] - held
        rows.append((far, (far / (near + far.sum(dim=-1, keepdim=True))).flatten(1, 2)))
    assert len(rows) == len(wanted)
    for (far, mine), all_of_them in zip(rows, wanted, strict=True):
        every = max(1, all_of_them.shape[2] // most)
        all_of_them = all_of_them[:, :, every - 1 :: every, : mine.shape[3]]
        torch.testing.assert_close(mine, torch.where(far.flatten(1, 2) > 0, all_of_them, 0.0), rtol=1e-4, atol=1e-6)


@each_kind
def test_known_scales_are_found(causal, padded, monkeypatch):
    """The products are made such that softmax is the kernel with certain scales: the fit finds those."""
    monkeypatch.setattr(start, "RIDGE", 1e-9)
    layer, targets = layer_and_targets(causal=causal, padded=padded)
    w, b, u = (tensor.detach().clone() for tensor in (stir(layer), scales(layer))[1])
    with torch.no_grad():
        for tensor in scales(layer):
            tensor.zero_()
    blocks = start._blocks

    def made(layer, targets, window):
        for queries, seen, scores, _, total in blocks(layer, targets, window):
            learned = [tensor - now for tensor, now in zip((w, b, u), scales(layer), strict=True)]
            x, keys = queries[..., :-1], seen[:, :, None]
            a = (x * learned[0].view(1, 2, 2, 1, 6)).sum(-1) + learned[1].view(1, 2, 2, 1)
            c = (keys * learned[2].view(1, 2, 1, 1, 6)).sum(-1)
            yield queries, seen, scores, scores - a[..., None] - c[:, :, :, None], total

    monkeypatch.setattr(start, "_blocks", made)
    fit_scales(layer, targets)
    for found, known in zip(scales(layer), (w, b, u), strict=True):
        torch.testing.assert_close(found.detach(), known, rtol=0, atol=1e-3)


@pytest.mark.parametrize("hybrid", [{}, {"exact_keys": 3}, {"scale": "network"}], ids=["linear", "exact", "network"])
def test_a_fit_brings_the_loss_down(hybrid):
    layer, targets = layer_and_targets(causal=True, **hybrid)
    loss = layer_loss("a", layer, DistillConfig(loss="weights"))

    def value():
        loss.reset()
        loss.add(targets, targets.k, train=False, sample=None)
        return loss.mean

    before = value()
    fit_scales(layer, targets)
    assert value() < before - 0.05


@pytest.mark.parametrize("heads", [(1,), (2, 3), (0, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("loss", ["weights", "output"])
def test_the_queries_of_a_head_that_keeps_softmax_reach_nothing(heads, loss):
    """They counted in the loss and in the fit, and pulled the map that their group shares."""
    found = []
    for seed in (0, 1):
        layer, targets = layer_and_targets(causal=True, padded=True, softmax_heads=heads)
        draw = torch.Generator().manual_seed(seed)
        targets.q[:, list(heads)] = torch.randn(3, len(heads), 40, 6, generator=draw)
        fit_scales(layer, targets)
        fitted = [tensor.detach().clone() for tensor in scales(layer)]
        one = layer_loss("a", layer.train(), DistillConfig(loss=loss))
        one.add(targets, targets.k, train=True, sample=torch.arange(3, 30))
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
        assert one.count == (4 - len(heads)) * int(targets.key_padding_mask[:, 3:30].sum())
        found.append([torch.tensor(one.total), *fitted, *gradients])
        assert not any(tensor[list(heads)].any() for tensor in fitted[:2])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert layer.mixer.learnable == (len(heads) < 4)


def test_rows_without_far_keys_leave_zero():
    layer, targets = layer_and_targets(causal=True, tokens=5)
    fit_scales(layer, targets)
    assert not any(bool(tensor.any()) for tensor in scales(layer))


def test_stage_one_starts_from_the_fit_where_it_is_better(monkeypatch):
    """Without steps' help: one step at the rate 0 ends where the fit is, or at zero if the fit is made worse."""

    def after(change=None):
        model = sharp("llama", kernel="hedgehog", window=2)
        if change is not None:
            monkeypatch.setattr(start, "fit_scales", change)
        result = distill(model, Fixed(batches(model)), DistillConfig(steps=1, learning_rate=0.0))
        layers = linear_attentions(model).values()
        return result, [any(bool(tensor.any()) for tensor in scales(layer)) for layer in layers]

    result, fitted = after()
    assert result.after.mean("kl") < result.before.mean("kl")
    assert any(fitted)
    result, fitted = after(lambda layer, targets: stir(layer))
    assert not any(fitted)
    assert result.after.mean("kl") == result.before.mean("kl")


def test_what_has_learned_is_left_alone(monkeypatch):
    model = sharp("llama", kernel="hedgehog", window=2)
    for layer in linear_attentions(model).values():
        stir(layer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    distill(model, Fixed(batches(model)), DistillConfig(steps=1, learning_rate=0.0))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
