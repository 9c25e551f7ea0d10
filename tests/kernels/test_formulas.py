"""The maps compute what their files say: each formula written out again, differently, on a few tokens."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from support.kernel_cases import make_inputs, make_mixer, run
from torch.utils.checkpoint import checkpoint

from linearize.core.errors import ConfigError
from linearize.core.registry import kernel_info, make_config
from linearize.kernels.flexformer_n import FlexformerN
from linearize.kernels.flexformer_s import FlexformerS

DIM, HEADS = 6, 3


def reset(kernel, generator=None):
    """Draw a kernel's parameters, without gradients as its mixer does."""
    with torch.no_grad():
        kernel.reset_parameters(generator or torch.Generator().manual_seed(0))


def make(name, **arguments):
    info = kernel_info(name)
    kernel = info.build(make_config(info, arguments), HEADS, DIM)
    reset(kernel)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    x = torch.randn(2, HEADS, 5, DIM, generator=generator)
    return kernel, x


def whole(features):
    """phi with its scale put back."""
    return features.phi if features.log_scale is None else features.phi * features.log_scale.exp()[..., None]


@pytest.mark.parametrize(
    ("name", "arguments", "formula"),
    [
        ("elu", {}, lambda x: 1 + torch.nn.functional.elu(x)),
        ("relu", {}, lambda x: x.clamp(min=0)),
        ("exp", {"temperature": 2.0}, lambda x: torch.exp(2 * x)),
        ("norm_elu", {}, torch.nn.functional.elu),
        ("norm_1elu", {}, lambda x: 1 + torch.nn.functional.elu(x)),
    ],
)
def test_maps_of_single_entries(name, arguments, formula):
    kernel, x = make(name, **arguments)
    torch.testing.assert_close(whole(kernel.forward_keys(x)), formula(x))


def test_elu_of_very_negative_numbers_is_not_zero():
    kernel, _ = make("elu")
    x = torch.full((1, 1, 1, 1), -40.0)
    torch.testing.assert_close(kernel.forward_keys(x).phi, x.exp(), rtol=1e-6, atol=0)


def test_taylor_is_the_second_order_expansion():
    kernel, x = make("taylor")
    y = x.flip(2)
    z = (x * y).sum(-1)
    found = (kernel.forward_queries(x).phi * kernel.forward_keys(y).phi).sum(-1)
    torch.testing.assert_close(found, 1 + z + z * z / 2)


def test_cosformer_weighs_by_the_distance():
    kernel, x = make("cosformer", max_positions=10)
    positions = torch.arange(5)[None].expand(2, -1)
    q, k = kernel.forward_queries(x, positions).phi, kernel.forward_keys(x.flip(2), positions).phi
    found = q @ k.transpose(-1, -2)
    distance = torch.arange(5)[:, None] - torch.arange(5)
    want = (x.relu() @ x.flip(2).relu().transpose(-1, -2)) * torch.cos(math.pi / 2 * distance / 10)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    late = kernel.forward_keys(x, torch.full((2, 5), 500))
    first = kernel.forward_queries(x, torch.zeros(2, 5))
    assert ((first.phi @ late.phi.transpose(-1, -2)) >= -1e-5).all()


def test_t2r_and_hedgehog():
    for name in ("t2r", "hedgehog"):
        kernel, x = make(name)
        y = torch.einsum("hfd,bhtd->bhtf", kernel.weight, x) + kernel.bias[:, None]
        both = torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)
        torch.testing.assert_close(whole(kernel.forward_keys(x)), y.relu() if name == "t2r" else both)
    kernel, x = make("hedgehog", activation="exp")
    y = torch.einsum("hfd,bhtd->bhtf", kernel.weight, x) + kernel.bias[:, None]
    torch.testing.assert_close(whole(kernel.forward_keys(x)), torch.cat([y, -y], -1).exp())


@pytest.mark.parametrize("activation", ["softmax", "exp"])
def test_a_start_of_two_is_the_untrained_map_of_twice_the_input(activation):
    (usual, x), (peaked, _) = (
        make("hedgehog", activation=activation),
        make("hedgehog", activation=activation, start=2.0),
    )
    for kernel in (usual, peaked):
        reset(kernel)
    torch.testing.assert_close(whole(peaked.forward_keys(x)), whole(usual.forward_keys(2 * x)))


def test_more_features_of_hedgehog_start_beside_the_usual_ones():
    usual, x = make("hedgehog")
    wide, _ = make("hedgehog", features=6 * DIM)
    start = torch.Generator().manual_seed(0)
    for kernel in (usual, wide):
        reset(kernel, start)
    assert wide.weight.shape == (HEADS, 3 * DIM, DIM)
    torch.testing.assert_close(wide.weight[:, :DIM], usual.weight, rtol=0, atol=0)
    for part in wide.weight[:, DIM:].split(DIM, dim=1):
        torch.testing.assert_close(part @ part.transpose(-1, -2), torch.eye(DIM).expand(HEADS, DIM, DIM))
    # The ends do not meet: what is drawn is another turn in every head, and in every block.
    assert (wide.weight[0, DIM:] - wide.weight[1, DIM:]).abs().max() > 0.1
    assert (wide.weight[:, DIM : 2 * DIM] - wide.weight[:, 2 * DIM :]).abs().max() > 0.1
    few, _ = make("hedgehog", features=DIM)
    assert few.forward_keys(x).phi.shape[-1] == DIM
    with pytest.raises(ConfigError, match=r"features: got 7, expected a whole number .*a multiple of 2"):
        make("hedgehog", features=7)


@pytest.mark.parametrize("shared_heads", [False, True])
@pytest.mark.parametrize("shared_mlp", [False, True])
@pytest.mark.parametrize("envelope", [False, True])
def test_luna_is_its_mlps_written_out(shared_heads, shared_mlp, envelope):
    shared = {"shared_heads": shared_heads, "shared_mlp": shared_mlp}
    kernel, x = make("luna", projections=4, channels=3, envelope=envelope, start="paper", **shared)
    with torch.no_grad():
        # Units without a slope, where the pieces have no knot.
        kernel.slope[..., 0] = 0.0
        kernel.slope[..., 1], kernel.offset[..., 1] = 0.0, 0.0
    x = x * 3
    u = (x @ kernel.weight.transpose(-1, -2) + kernel.bias[:, None])[..., None, None]
    s, t, v, c = (p[:, None, None] for p in (kernel.slope, kernel.offset, kernel.out_weight, kernel.out_bias))
    psi = ((s * u + t).relu() * v).sum(-1) + c
    want = psi.relu() * 4**-0.5
    if envelope:
        want = want * (x @ kernel.gate.transpose(-1, -2) + kernel.gate_bias[:, None]).sigmoid()[..., None, :]
    found = kernel.forward_keys(x).phi
    want = want.flatten(-2)
    assert (found > 0).any() and (found == 0).any()
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    direction = torch.linspace(-1, 1, found.numel()).reshape(found.shape)
    mine = torch.autograd.grad((found * direction).sum(), list(kernel.parameters()))
    theirs = torch.autograd.grad((want * direction).sum(), list(kernel.parameters()))
    for (name, parameter), one, two in zip(kernel.named_parameters(), mine, theirs, strict=True):
        keep = torch.ones_like(parameter, dtype=torch.bool)
        if name in ("slope", "offset"):
            keep[..., 1] = False  # exactly on the kink: any slope between 0 and 1 is a gradient
        torch.testing.assert_close(one[keep], two[keep], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shared_mlp", [False, True])
@pytest.mark.parametrize(("channels", "rates"), [(1, [4.0]), (2, [-4.0, 4.0]), (5, [-4.0, -2.0, 0.0, 2.0, 4.0])])
def test_luna_starts_at_exponentials_of_orthogonal_projections(channels, rates, shared_mlp):
    kernel, x = make("luna", projections=4, channels=channels, shared_mlp=shared_mlp)
    reset(kernel)
    rows = 4 * kernel.weight
    torch.testing.assert_close(rows @ rows.transpose(-1, -2), torch.eye(4).expand(HEADS, 4, 4), rtol=0, atol=1e-6)
    u = x @ kernel.weight.transpose(-1, -2)
    assert u.abs().max() < 2
    want = (u[..., None] * torch.tensor(rates)).exp().flatten(-2) * 4**-0.5
    # Straight lines between points 1/16 apart lie above exp(4 u), by at most (4 / 16)^2 / 8 of it.
    ratio = kernel.forward_keys(x).phi / want
    assert ratio.min() > 0.9999 and ratio.max() < 1.0079
    assert ratio.max() > 1.007 or channels == 1


def test_lunas_gate_starts_constant():
    kernel, x = make("luna", envelope=True)
    plain, _ = make("luna")
    reset(kernel)
    reset(plain)
    torch.testing.assert_close(kernel.forward_keys(x).phi, plain.forward_keys(x).phi / 2)


@pytest.mark.parametrize("hidden", [1, 2, 3])
def test_luna_with_few_units_starts_alive(hidden):
    kernel, x = make("luna", hidden=hidden)
    reset(kernel)
    phi = kernel.forward_keys(x).phi
    assert (phi > 0).any(dim=2).all()


def test_luna_folds_once_and_again_when_weights_change(monkeypatch):
    kernel, x = make("luna")
    folds, real = [], kernel._fold
    monkeypatch.setattr(kernel, "_fold", lambda: folds.append(1) or real())
    with torch.no_grad():
        first = kernel.forward_keys(x).phi
        assert torch.equal(kernel.forward_keys(x).phi, first) and len(folds) == 1
        # As averages of weights are put in place: past autograd's version counters.
        kernel.out_weight.data.mul_(2.0)
        second = kernel.forward_keys(x).phi
        assert len(folds) == 2 and not torch.equal(second, first)
    with_gradient = kernel.forward_keys(x).phi
    assert len(folds) == 3 and torch.equal(with_gradient, second)
    kernel.bfloat16()
    with torch.no_grad():
        assert torch.isfinite(kernel.forward_keys(x).phi).all() and len(folds) == 4


def test_polaformer_mixes_same_and_opposite_signs():
    kernel, x = make("polaformer")
    y = x.flip(2)
    p = 1 + 3 * kernel.power.sigmoid()[:, None]
    a, b = (torch.nn.functional.softplus(raw)[:, None] for raw in (kernel.same, kernel.opposite))
    (qp, qn), (kp, kn) = ((z.clamp(min=0) ** p, (-z).clamp(min=0) ** p) for z in (x, y))
    want = (a * (qp * kp + qn * kn) + b * (qp * kn + qn * kp)).sum(-1)
    found = (kernel.forward_queries(x).phi * kernel.forward_keys(y).phi).sum(-1)
    torch.testing.assert_close(found, want)


def test_performer_directions_are_orthogonal_with_gaussian_lengths():
    info = kernel_info("performer")
    kernel = info.build(make_config(info, {"features": 40}), 200, 16)
    reset(kernel)
    products = kernel.weight[:, :16] @ kernel.weight[:, :16].transpose(-1, -2)
    off = products - torch.diag_embed(products.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-4
    assert kernel.weight.square().sum(-1).mean().item() == pytest.approx(16, rel=0.02)
    assert kernel.weight.mean().abs() < 0.02


def test_macformer_has_half_of_its_features_of_degree_zero_and_so_on():
    info = kernel_info("macformer_inv")
    assert make_config(info, {}).degrees() == [64, 32, 16, 8, 4, 2, 1, 1]
    assert [sum(make_config(info, {"features": n}).degrees()) for n in (2, 3, 77, 128)] == [2, 3, 77, 128]


@pytest.mark.parametrize("name", ["macformer_exp", "macformer_trigh"])
def test_a_macformer_without_ppsbn_is_attention_with_the_plain_features(name):
    """The ablation: no statistics, no rescaling, and the mean over draws is softmax."""
    info, (q, k, v) = kernel_info(name), make_inputs(9, key_heads=4, scale=0.5)
    mixer = make_mixer(info, {"ppsbn": False, "features": 4096}, causal=False, key_heads=4)
    assert mixer.inputs is None and mixer.output is None and not mixer.learnable
    weights, draws = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1), []
    for seed in range(8):
        mixer.reset_parameters(torch.Generator().manual_seed(seed))
        draws.append(run(mixer, q, k, v)[0])
    torch.testing.assert_close(torch.stack(draws).mean(dim=0), weights @ v, rtol=0.05, atol=0.02)


def test_ppsbn_learns_the_statistics_while_training_and_keeps_them():
    mixer = make_mixer(kernel_info("macformer_exp"), causal=True).train()
    q, k, v = make_inputs(400)
    q, k = q * 3 + 2, k * 0.5 - 1
    mask = torch.ones(2, 400, dtype=torch.bool)
    mask[0, 300:] = False
    q[0, :, 300:], k[0, :, 300:] = 1e3, 1e3
    for _ in range(3):
        run(mixer, q, k, v, mask)
    around = mixer.inputs
    real = torch.cat([q[0, :, :300], q[1]], dim=1)
    torch.testing.assert_close(around.query_mean, real.mean(dim=1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(around.query_variance, real.var(dim=1, unbiased=False), rtol=1e-3, atol=1e-3)
    assert around.key_variance.mean().item() == pytest.approx(0.25, rel=0.1)
    assert around.batches.item() == 3
    kept = {name: tensor.clone() for name, tensor in around.named_buffers()}
    with torch.no_grad():
        run(mixer, q * 9, k, v, mask)
    run(mixer.eval(), q * 9, k, v, mask)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in around.named_buffers())


@pytest.mark.parametrize("reentrant", [False, True])
def test_ppsbn_counts_a_batch_once_under_gradient_checkpointing_whose_gradient_is_the_same(reentrant):
    gradients = []
    for checkpointed in (False, True):
        mixer = make_mixer(kernel_info("macformer_exp"), causal=False).train()
        inputs = [x.requires_grad_() for x in make_inputs(12)]
        call = partial(checkpoint, run, use_reentrant=reentrant) if checkpointed else run
        call(mixer, *inputs)[0].sum().backward()
        gradients.append([x.grad for x in inputs])
        assert mixer.inputs.batches.item() == 1
    assert all(map(torch.equal, *gradients))


def test_ppsbn_rescales_with_the_sign_kept():
    mixer = make_mixer(kernel_info("macformer_exp"), causal=False)
    mixed = torch.tensor([-2.0, -0.5, 0.0, 1e-9, 0.5, 2.0]).expand(1, 4, 1, -1)
    torch.testing.assert_close(mixer.apply_output(mixed), mixed)
    with torch.no_grad():
        mixer.output.gamma.fill_(3.0)
        mixer.output.beta.fill_(0.5)
    y = 3 * mixed[..., [0, 1, 4, 5]]
    torch.testing.assert_close(mixer.apply_output(mixed)[..., [0, 1, 4, 5]], y.sign() * y.abs() ** 0.5)
    steep = mixed.clone().requires_grad_()
    mixer.apply_output(steep).sum().backward()
    assert torch.isfinite(steep.grad).all()


@pytest.mark.parametrize("name", ["norm_elu", "norm_1elu", "diag_rela"])
def test_outputs_without_a_denominator_are_normalised(name):
    mixer = make_mixer(kernel_info(name), causal=False)
    out, _ = run(mixer, *make_inputs(30))
    torch.testing.assert_close(out.square().mean(-1).sqrt(), torch.ones(out.shape[:-1]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_do_not_overlap(causal):
    mixer = make_mixer(kernel_info("diag_softmax"), {"block": 4}, causal=causal)
    q, k, _ = make_inputs(10)
    weights = mixer.weights(q, k, scaling=0.25)
    scores = 0.25 * q @ k.repeat_interleave(2, 1).transpose(-1, -2)
    for start in (0, 4, 8):
        part = slice(start, min(start + 4, 10))
        near = scores[:, :, part, part]
        if causal:
            near = near.masked_fill(torch.ones(near.shape[-2:]).triu(1).bool(), -torch.inf)
        torch.testing.assert_close(weights[:, :, part, part], near.softmax(-1))
        assert (weights[:, :, part, part.stop :] == 0).all() and (weights[:, :, part, :start] == 0).all()


def test_positive_flexformer_n():
    kernel, x = make("flexformer_n", frequencies=7)
    s = torch.einsum("hfd,bhtd->bhtf", kernel.b, x).softmax(-1)
    angle = torch.einsum("hfd,bhtd->bhtf", kernel.a, x) + math.pi / 4
    r = (4 * torch.tanh(torch.einsum("hd,bhtd->bht", kernel.m, x) / 4)).exp()
    assert (r - 1).abs().max() > 0.5
    want = r[..., None] * torch.cat([s * angle.cos().square(), s * angle.sin().square()], -1)
    found = kernel.forward_keys(x)
    torch.testing.assert_close(found.phi, want)
    assert found.log_scale is None and not kernel.scale_inputs
    torch.testing.assert_close(found.phi.sum(-1), r)
    assert torch.equal(kernel.forward_queries(x).phi, found.phi)
    far = kernel.forward_queries(1e4 * x).phi
    assert (far >= 0).all() and (far <= math.exp(4) * (1 + 1e-6)).all()


@pytest.mark.parametrize("name", ["flexformer_n", "flexformer_s"])
@pytest.mark.parametrize("causal", [False, True])
def test_an_untrained_magnitude_changes_no_bit(causal, name):
    info = kernel_info(name)
    inputs = make_inputs(30)
    with_it, without = (make_mixer(info, {"magnitude": on}, causal=causal) for on in (True, False))
    assert set(dict(with_it.named_parameters())) - set(dict(without.named_parameters())) == {"keys.m"}
    assert torch.equal(with_it.keys.m, torch.zeros_like(with_it.keys.m))
    assert torch.equal(run(with_it, *inputs)[0], run(without, *inputs)[0])
    with torch.no_grad():
        with_it.keys.m.fill_(1.0)
    assert not torch.equal(run(with_it, *inputs)[0], run(without, *inputs)[0])


def test_the_magnitude_of_a_query_cancels():
    mixer = make_mixer(kernel_info("flexformer_n"), {"tied": False}, causal=False)
    before, _ = run(mixer, *make_inputs(30))
    with torch.no_grad():
        mixer.queries.m.fill_(1.0)
    after, _ = run(mixer, *make_inputs(30))
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize(
    ("name", "form", "names"),
    [
        ("flexformer_n", "paper", {"a", "b", "tau"}),
        ("flexformer_n", "damped", {"a", "b"}),
        ("flexformer_s", "paper", {"weight", "tau"}),
        ("flexformer_s", "squared", {"weight", "tau"}),
    ],
)
def test_other_forms_have_no_magnitude(name, form, names):
    info = kernel_info(name)
    for on in (True, False):
        config = make_config(info, {"form": form, "magnitude": on})
        kernel = info.build(config, HEADS, DIM)
        assert set(dict(kernel.named_parameters())) == names
        assert info.parameters(config, DIM) == sum(p[0].numel() for p in kernel.parameters())


@pytest.mark.parametrize("name", ["flexformer_n", "flexformer_s"])
def test_training_follows_keys_that_are_attended_to_whatever_the_query(name):
    """Softmax weights whose scores have a term of the key alone: the magnitude learns it, the rest cannot."""
    info = kernel_info(name)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, 1, 1, 200, 8, generator=generator).unbind()
    liked = torch.zeros(8)
    liked[0] = 1.5
    wanted = (x @ y.mT / 8 + (y @ liked)[..., None, :]).softmax(-1)
    losses = []
    for on in (True, False):
        kernel = info.build(make_config(info, {"magnitude": on}), 1, 8)
        reset(kernel)
        optimizer = torch.optim.Adam(kernel.parameters(), lr=1e-2)
        for _ in range(100):
            weights = kernel.forward_queries(x).phi @ kernel.forward_keys(y).phi.mT
            loss = -(wanted * (weights / weights.sum(-1, keepdim=True)).log()).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item() + (wanted * wanted.log()).sum(-1).mean().item())
        if on:
            learned = kernel.m[0].detach()
    assert learned[0] > 0.5 and learned.argmax() == 0
    assert 0 < losses[0] < 0.5 * losses[1]


@pytest.mark.parametrize("n", [1, 4, 6, 9, 12, 15, 24])
@pytest.mark.parametrize("name", ["flexformer_n", "flexformer_s"])
def test_positive_flexformers_start_at_a_basis_and_minus_it(name, n):
    info = kernel_info(name)
    kernel = info.build(make_config(info, {"frequencies": n}), HEADS, DIM)
    reset(kernel)
    start = kernel.b if name == "flexformer_n" else kernel.weight
    basis = start[:, :DIM]
    torch.testing.assert_close(basis @ basis.mT, torch.eye(min(n, DIM)).expand(HEADS, -1, -1), rtol=0, atol=1e-6)
    assert torch.equal(start[:, DIM : 2 * DIM], -basis[:, : max(0, n - DIM)])
    another = start[:, 2 * DIM : 3 * DIM]
    assert not another.numel() or (another @ basis.mT).abs().max() < 0.999


def test_positive_flexformer_s():
    kernel, x = make("flexformer_s", frequencies=5)
    y = torch.einsum("hfd,bhtd->bhtf", kernel.weight, x)
    angle = kernel.stretch[:, None] * y[..., [1, 2, 3, 4, 0]] + math.pi / 4
    r = (4 * torch.tanh(torch.einsum("hd,bhtd->bht", kernel.m, x) / 4)).exp()[..., None]
    want = r * torch.cat([y.softmax(-1) * angle.cos().square(), y.softmax(-1) * angle.sin().square()], -1)
    found = kernel.forward_keys(x)
    torch.testing.assert_close(found.phi, want)
    assert found.log_scale is None and not kernel.scale_inputs
    assert (kernel.forward_queries(1e4 * x).phi >= 0).all()


def test_paper_flexformer_n():
    kernel, x = make("flexformer_n", form="paper")
    a, b = (torch.einsum("hfd,bhtd->bhtf", w, x) for w in (kernel.a, kernel.b))
    h = (x.square().sum(-1) / kernel.tau.exp()[:, None]).exp()[..., None]
    want = h * torch.cat([a.cos() * b.cos(), a.sin() * b.cos()], -1) * DIM**-0.5
    torch.testing.assert_close(whole(kernel.forward_keys(x)), want)
    assert kernel.scale_inputs


def test_squared_flexformer_is_the_square_of_the_plain_one_and_never_negative():
    info = kernel_info("flexformer_s")
    plain = FlexformerS(make_config(info, {"frequencies": 3, "form": "paper"}), 2, 8)
    squared = FlexformerS(make_config(info, {"frequencies": 3, "form": "squared"}), 2, 8)
    for one in (plain, squared):
        reset(one)
    q, k = torch.randn(2, 1, 2, 5, 8, generator=torch.Generator().manual_seed(1)).unbind()
    products = plain.forward_queries(q).phi @ plain.forward_keys(k).phi.transpose(-1, -2)
    squares = squared.forward_queries(q).phi @ squared.forward_keys(k).phi.transpose(-1, -2)
    torch.testing.assert_close(squares, products.square())
    assert squared.forward_queries(q).phi.shape[-1] == 3 * 7
    assert make_config(info, {"form": "squared"}).features(32) == 55


def test_damped_flexformer_with_no_waves_is_one_half_of_hedgehog():
    info = kernel_info("flexformer_n")
    damped = FlexformerN(make_config(info, {"form": "damped", "init_scale": 0.0}), 1, 16)
    reset(damped)
    x = torch.randn(1, 1, 5, 16)
    phi = damped.forward_keys(x * 16**-0.25).phi
    torch.testing.assert_close(phi[..., :16], x.softmax(-1))
    assert (phi[..., 16:] == 0).all()
