"""Loss and gradient of stage one equal the plain reference, whatever meets: options, layouts, kernels, additions."""

import copy
import dataclasses
import functools
import itertools
import random

import pytest
import torch
from support.kernel_cases import FAMILIES, KERNELS, make_inputs, make_mixer, needed
from support.plain_loss import plain_loss
from support.tiny import stir
from support.training import sharp

from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.core.registry import HYBRID, SCALES, Hybrid
from linearize.training.sharding import make_accelerator
from linearize.training.stage_one import DistillConfig
from linearize.training.stage_one.observer import KernelTrainer, LayerLoss, layer_loss

TOKENS = 16
WINDOW = {"window": 4, "scale": "linear"}
ADDITIONS = {
    "window": [{"window": 4, "scale": "none"}, {"window": 5, "scale": "none"}],
    "sinks": [{**WINDOW, "sinks": 2}],
    "exact_keys": [{**WINDOW, "window": 3, "exact_keys": 2}, {**WINDOW, "sinks": 1, "exact_keys": 3}],
    "scale": [{**WINDOW, "scale": kind} for kind in SCALES[1:]],
    "softmax_heads": [{"softmax_heads": heads} for heads in ((1,), (0, 1), (0, 3), (1, 2, 3))]
    + [{**WINDOW, "softmax_heads": (0, 1, 2)}],
    "routed_blocks": [{**WINDOW, "routed_blocks": "2:3"}, {**WINDOW, "sinks": 3, "routed_blocks": "1:2"}],
    "routed_heads": [{**WINDOW, "routed_blocks": "2:2", "routed_heads": heads} for heads in ((1,), (0, 3))],
    "trained_length": [{**WINDOW, "trained_length": 6}, {**WINDOW, "exact_keys": 2, "trained_length": 3}],
}
"""Values of every addition of a layer."""

HEDGEHOG = next(info for info in KERNELS if info.name == "hedgehog")
KINDS = {
    **{info.name: (info, {}) for info in FAMILIES.values()},
    **{f"{info.name}, window": (info, WINDOW) for info in KERNELS if info.positional},
    **{
        f"{info.name}, heads": (info, {"softmax_heads": (1,)})
        for info in FAMILIES.values()
        if info.windowed and not info.is_positive(info.config(**needed(info)))
    },
    **{
        f"{name} {number}": (HEDGEHOG, values)
        for name, several in ADDITIONS.items()
        for number, values in enumerate(several)
    },
}
PLACES = [(name, layout) for name in ("llama", "bert") for layout in ("none", "left", "right", "packed")]
OPTIONS = list(
    itertools.product(
        # Query sample, feed, accumulation, precision, loss.
        *((None, 5), ("teacher", "student"), (1, 2), ("no", "bf16", "fp16"), ("auto", "output"))
    )
)
random.Random(0).shuffle(OPTIONS)
PART = dict.fromkeys(KINDS, "kernel") | {
    f"{name} {number}": name for name, several in ADDITIONS.items() for number in range(len(several))
}
# Every kind in every place, with options in turn: each round has others.
ROUNDS = 4
CASES = [
    (PART[kind], kind, place, *OPTIONS[(number * ROUNDS + turn) % len(OPTIONS)])
    for turn in range(ROUNDS)
    for number, (kind, place) in enumerate(itertools.product(KINDS, PLACES))
]
NAMES = ("part", "kind", "place", "sample", "feed", "accumulation", "precision", "loss")


def test_every_addition_is_in_the_matrix():
    assert set(ADDITIONS) == set(HYBRID), "give the new addition values here, and its formula in support.plain_loss"
    assert all(name in values for name, several in ADDITIONS.items() for values in several)


@pytest.mark.parametrize("layout", ["none", "left", "right"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_weights_of_some_queries_are_rows_of_all(kind, causal, layout):
    """Fewer queries than keys were taken for the last ones of their row."""
    info, values = KINDS[kind]
    values = {key: value for key, value in values.items() if causal or key != "trained_length"}
    mixer = make_mixer(info, causal=causal, **values)
    q, k, _ = make_inputs(TOKENS)
    mask = torch.ones(len(q), TOKENS, dtype=torch.bool)
    mask[0, {"none": [], "left": range(5), "right": range(11, 16)}[layout]] = False
    options = {"scaling": 0.3, "key_padding_mask": None if layout == "none" else mask}
    rows = torch.tensor([12, 1, 7, 8, 15, 3])
    whole, some = mixer.weights(q, k, **options), mixer.weights(q, k, rows=rows, **options)
    torch.testing.assert_close(some, whole[:, :, rows], rtol=1e-5, atol=1e-6)


def batches_of(layout, accumulation):
    """Two documents in one batch, or one in each of two."""
    draw = torch.Generator().manual_seed(0)
    documents = [
        torch.randint(3, 90, (length,), generator=draw) for length in ((16, 16) if layout == "none" else (16, 10))
    ]
    groups = [documents] if accumulation == 1 else [[document] for document in documents]
    return [laid_out(layout, group) for group in groups]


def laid_out(layout, documents):
    if layout == "packed":
        rows = [*documents, torch.tensor([7])]
        places = torch.cat([torch.arange(len(row)) for row in rows])
        ends = torch.tensor([0, *itertools.accumulate(map(len, rows))], dtype=torch.int32)
        return {"input_ids": torch.cat(rows)[None], "position_ids": places[None], "cu_seq_lens_q": ends}
    ids, mask = torch.zeros(len(documents), TOKENS, dtype=torch.long), torch.zeros(len(documents), TOKENS).long()
    for row, document in enumerate(documents):
        part = slice(TOKENS - len(document), None) if layout == "left" else slice(len(document))
        ids[row, part], mask[row, part] = document, 1
    batch = {"input_ids": ids, "attention_mask": mask}
    return batch if layout != "none" else {"input_ids": ids}


@pytest.mark.sampled("values", "kind")
@pytest.mark.sampled("pairs", *(name for name in NAMES if name != "kind"))
@pytest.mark.parametrize(NAMES, CASES, ids=str)
def test_loss_and_gradient_are_those_of_the_plain_reference(
    part, kind, place, sample, feed, accumulation, precision, loss, monkeypatch
):
    (info, values), (name, layout) = KINDS[kind], place
    if name == "bert":
        # Only causal layers fade.
        values = {key: value for key, value in values.items() if key != "trained_length"}
    model = model_with(name, info.name, values)
    config = DistillConfig(
        loss=loss,
        feed=feed,
        query_sample=sample,
        gradient_accumulation=accumulation,
        precision=precision,
        learning_rate=0.0,
    )
    losses = [layer_loss(name, layer, config) for name, layer in linear_attentions(model).items()]
    for loss in losses:
        loss.layer.train().requires_grad_(True)
        loss.training = dataclasses.replace(loss.training, max_grad_norm=1e9)
    seen = watched(monkeypatch)
    before = {loss.name: copy.deepcopy(loss.layer.mixer).eval() for loss in losses}
    trainer = KernelTrainer(model, losses, config, make_accelerator(model))
    trainer.step(iter(batches_of(layout, accumulation)), 1)
    for loss in losses:
        mixer, inputs = loss.layer.mixer, getattr(before[loss.name], "inputs", None)
        total, count = torch.zeros((), dtype=torch.float64), 0
        for q, k, v, asked, scaling in documents_of(seen[loss.name]):
            part, number = plain_loss(
                mixer, q, k, v, asked, scaling=scaling, output=bool(loss.output), penalty=loss.penalty, inputs=inputs
            )
            total, count = total + part, count + number
        assert loss.count == count > 0
        assert loss.mean == pytest.approx(float(total.detach()) / count, rel=1e-4, abs=1e-5)
        parameters = list(loss.layer.parameters())
        wanted = torch.autograd.grad(total / count, parameters, allow_unused=True, materialize_grads=True)
        largest = max(float(gradient.norm()) for gradient in wanted)
        assert largest > 1e-4
        for parameter, gradient in zip(parameters, wanted, strict=True):
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found, gradient, rtol=1e-3, atol=1e-4 * largest)


def watched(monkeypatch):
    """Note what each layer's loss is given, by the layer's name."""
    seen, add = {}, LayerLoss.add

    def noting(self, targets, v, *, train, sample):
        seen.setdefault(self.name, []).append((targets, v, sample))
        add(self, targets, v, train=train, sample=sample)

    monkeypatch.setattr(LayerLoss, "add", noting)
    return seen


def documents_of(calls):
    """Yield q, k and v of each document without padding, and the places of its queries that count."""
    for targets, v, sample in calls:
        q, k, mask = targets.q, targets.k, targets.key_padding_mask
        for row in range(len(q)):
            real = torch.arange(q.shape[2]) if mask is None else mask[row].nonzero()[:, 0]
            columns = set(range(q.shape[2]) if sample is None else sample.tolist())
            asked = [place for place, column in enumerate(real.tolist()) if column in columns]
            yield q[row][:, real], k[row][:, real], v[row][:, real], asked, targets.scaling


@functools.cache
def host(name):
    return sharp(name)


def model_with(name, kernel, values):
    """A tiny model whose layers have a kernel with additions, away from its start."""
    model = host(name)
    info = next(info for info in KERNELS if info.name == kernel)
    for module, old in linear_attentions(model).items():
        layer = LinearAttention(kernel, needed(info), old.shape, Hybrid(**values))
        layer.reset_parameters(0)
        layer.declares_direction = old.declares_direction
        model.get_submodule(module).linear_attention = layer
    model.eval().requires_grad_(False)
    return stir(model)
