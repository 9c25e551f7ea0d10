"""The memory of a step of stage one: no T x T matrix, no graph of the frozen model, no tensors of earlier layers."""

import itertools
import math
import weakref

import pytest
import torch
import torch.nn.functional as nnf
import transformers
from support.tiny import CONFIGS
from support.training import Fixed, sharp
from support.weights_loss import weights_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import linearize
import linearize.training.stage_one.loss as loss_module
from linearize.attention.interface import linear_attentions
from linearize.training.sharding import make_accelerator
from linearize.training.stage_one import DistillConfig
from linearize.training.stage_one.loop import distill
from linearize.training.stage_one.loss import Targets
from linearize.training.stage_one.observer import KernelTrainer, LayerLoss, layer_loss

TOKENS = 256


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned, in numbers."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return out


def model_of(name, kernel):
    """A model for 256 tokens."""
    config, options = CONFIGS[name]
    place = "n_positions" if name == "gpt2" else "max_position_embeddings"
    config = getattr(transformers, config)(**{**options, place: TOKENS})
    torch.manual_seed(0)
    return linearize.convert(transformers.AutoModel.from_config(config), kernel=kernel)


def trainer_of(model, **options):
    model.eval().requires_grad_(False)
    config = DistillConfig(**options)
    layers = [layer_loss(name, layer, config) for name, layer in linear_attentions(model).items()]
    for loss in layers:
        loss.layer.train().requires_grad_(True)
    return KernelTrainer(model, layers, config, make_accelerator(model))


def tokens(batch=1, length=TOKENS):
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.sampled("values")
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("kernel", ["hedgehog", "flexformer_n"])
def test_no_matrix_of_all_pairs(name, kernel, padded, monkeypatch):
    """The largest tensor of a step is of the order of the tokens, not of their square."""
    monkeypatch.setattr(loss_module, "CPU_NUMBERS", 1 << 12)
    monkeypatch.setattr(loss_module, "LEAST_ROWS", 8)
    monkeypatch.setattr(loss_module, "CAUSAL_ROWS", 8)
    model = model_of(name, kernel)
    trainer = trainer_of(model)
    batch = {"input_ids": tokens(), "attention_mask": torch.ones(1, TOKENS, dtype=torch.long)}
    if padded:
        batch["attention_mask"][:, 200:] = 0
    with Largest() as seen:
        trainer.step(itertools.repeat(batch), 1)
    # 4 heads of 16 features for every token, or GPT-2's hidden units; the whole matrices would be 4 * 256 per token.
    assert seen.numbers == (128 if name == "gpt2" else 4 * 16) * TOKENS


def test_one_layer_at_a_time_is_held(monkeypatch):
    """When a layer's loss is taken, nothing is left of the q and k of the layers before it, nor any graph."""
    model = sharp("bert")
    kept, graphs = [], []
    add = LayerLoss.add

    def watched(self, targets, v, **options):
        graphs.extend(x.requires_grad or x.grad_fn is not None for x in (targets.q, targets.k, v))
        assert [what for what in kept if what() is not None] == []
        add(self, targets, v, **options)
        kept.extend(weakref.ref(x) for x in (targets.q, targets.k))

    monkeypatch.setattr(LayerLoss, "add", watched)
    trainer = trainer_of(model)
    trainer.step(itertools.repeat({"input_ids": tokens(2, 12)}), 1)
    assert len(graphs) == 6 and not any(graphs)
    assert len(kept) == 4 and all(what() is None for what in kept)
    frozen = [p for n, p in model.named_parameters() if ".linear_attention." not in n]
    assert all(p.grad is None and not p.requires_grad for p in frozen)


def test_the_frozen_model_runs_sdpa_without_gradients(monkeypatch):
    trainer = trainer_of(sharp("bert"))
    calls = []
    sdpa = nnf.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(torch.is_grad_enabled())
        return sdpa(*args, **kwargs)

    monkeypatch.setattr(nnf, "scaled_dot_product_attention", counted)
    trainer.step(itertools.repeat({"input_ids": tokens(2, 12)}), 1)
    assert calls == [False, False]


@pytest.mark.sampled("pairs")
@pytest.mark.parametrize("sample", [None, 5], ids=["all", "sampled"])
@pytest.mark.parametrize("kernel", ["hedgehog", "flexformer_n", "polaformer"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_gradient_reaches_the_parameters(name, kernel, sample, monkeypatch):
    """They get the gradient of the loss on features of the whole sequence."""
    monkeypatch.setattr(loss_module, "CPU_NUMBERS", 2 * 2 * 4 * 8 * 5)
    layer = next(iter(linear_attentions(sharp(name, kernel=kernel)).values()))
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 23, 8, generator=draw)
    k = torch.randn(2, layer.shape.key_heads, 23, 8, generator=draw)
    positions = None if sample is None else torch.tensor([1, 4, 9, 16, 22])
    targets = Targets(q, k, 0.5, layer.shape.causal)
    loss = layer_loss("first", layer, DistillConfig(loss="weights"))
    (phi_q, query_scale), (phi_k, scale) = layer.mixer.mapped(q, k, scaling=0.5)
    phi_q = phi_q if positions is None else phi_q[:, :, positions]
    want = weights_loss(phi_q, phi_k, scale, targets.sampled(positions), negative_penalty=loss.penalty)
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(want, parameters, allow_unused=True)
    loss.add(targets, k, train=True, sample=positions)
    assert query_scale is None and loss.total == pytest.approx(want.item(), rel=1e-6)
    for parameter, gradient in zip(parameters, expected, strict=True):
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-4)


def test_a_row_that_is_all_padding_counts_nothing():
    batch = {"input_ids": tokens(3, 12), "attention_mask": torch.ones(3, 12, dtype=torch.long)}
    alone = {name: value[:2] for name, value in batch.items()}
    batch["attention_mask"][2] = 0
    losses = [distill(sharp("bert"), Fixed([one]), DistillConfig(steps=1)).history[0].losses for one in (batch, alone)]
    for layer, value in losses[0].items():
        assert math.isfinite(value) and value == pytest.approx(losses[1][layer], rel=1e-6)
