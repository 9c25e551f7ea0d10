"""torch.compile without a graph break, torch.export, gradient checkpointing: the same numbers as eager."""

from __future__ import annotations

import shutil

import pytest
import torch
from support.tiny import CLIP_TEXT, IMAGE, converted, inputs_of, outputs

from linearize.attention.cache import cache_argument
from linearize.attention.interface import linear_attentions
from linearize.ops.window_causal import softmax_part
from linearize.ops.window_parts import Keys, collect

MODELS = ["bert", "roberta", "distilbert", "modernbert", "gpt2", "llama", "qwen2", "vit", "clip", "bart"]
FEW = ["vit", "bart"]
"""With `test_traced_autograd_gives_the_same` one of each kind; to trace the others is left to `make slow`."""


def few(names, kept=FEW):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in kept)) for name in names]


# Tracing takes as long again for each layer: one layer of each kind.
ONE = {"num_hidden_layers": 1}
LAYERS = {
    "distilbert": {"n_layers": 1},
    "gpt2": {"n_layer": 1},
    "modernbert": {"num_hidden_layers": 2},
    "bart": {"encoder_layers": 1, "decoder_layers": 1},
    "clip": {"text_config": CLIP_TEXT | ONE, "vision_config": IMAGE | ONE},
}


def model_and_inputs(name: str, mask: bool, config=None):
    model = converted(name, config=LAYERS.get(name, ONE) if config is None else config)
    inputs = inputs_of(model, tokens=8)
    if name == "bart":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :5]
    if not mask:
        inputs.pop("attention_mask", None)
    return model, inputs


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mask", [False, True], ids=["no-mask", "mask"])
@pytest.mark.parametrize("name", few(MODELS))
@pytest.mark.sampled("values")
def test_compile_has_no_graph_break(name, mask):
    model, inputs = model_and_inputs(name, mask)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    more = {"use_cache": False} if name in ("gpt2", "llama", "qwen2", "bart") else {}
    want, got = outputs(model, inputs, **more), outputs(compiled, inputs, **more)
    for one, two in zip(want, got, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", few(["gpt2", "llama"], ["llama"]))
def test_compile_with_the_default_cache_and_in_training(name):
    model, inputs = model_and_inputs(name, mask=False)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    want = outputs(model, inputs)[0]
    torch.testing.assert_close(outputs(compiled, inputs)[0], want, rtol=0, atol=2e-6)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    compiled(**inputs)[0].square().mean().backward()
    assert all(p.grad is not None for layer in linear_attentions(model).values() for p in layer.parameters())


@pytest.mark.parametrize(
    "more",
    [pytest.param({}, marks=pytest.mark.slow), {"exact_keys": 2}, {"routed_blocks": "1:2"}],
    ids=["window", "exact keys", "routed blocks"],
)
def test_compiled_decoding_with_a_window_finds_its_state(more):
    model = converted("llama", config=ONE, window=4, sinks=1, **more)
    tokens, compiled = inputs_of(model, tokens=16)["input_ids"], torch.compile(model, backend="eager")
    cache = model.new_cache()
    with torch.no_grad():
        want = model(tokens, use_cache=False)[0]
        parts = [compiled(part, **cache_argument(model, cache))[0] for part in tokens.split([12, 1, 1, 2], dim=1)]
    assert cache.get_seq_length() == 16
    torch.testing.assert_close(torch.cat(parts, dim=1), want, rtol=0, atol=2e-6)


def softmax_with_sinks(q, k, v):
    keys, place = Keys(k, v, torch.ones_like(k[:, 0, :, 0], dtype=torch.bool)), torch.arange(k.shape[2])
    sink_k, sink_v, there, _ = collect(keys, 2, None)
    left = place[:, None] - torch.arange(2) >= 8
    column = sink_k, sink_v, (left & there[:, None])[:, None]
    return softmax_part(q, keys.padded(7), 0, 8, 0.4, [column])[0]


def tokens_of_a_head(length):
    return [torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="the default backend needs a C++ compiler")
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="without vectors PyTorch's own code does not compile"
)
def test_the_default_backend_compiles_sinks():
    """A length that does not fill whole blocks: the sinks' visibility is padded."""
    given = tokens_of_a_head(40)
    torch.testing.assert_close(torch.compile(softmax_with_sinks)(*given), softmax_with_sinks(*given))


def test_lengths_below_a_block_share_a_graph():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(softmax_with_sinks, backend=backend, dynamic=True)
    for length in (40, 70, 20, 9, 5, 3, 2):
        given = tokens_of_a_head(length)
        torch.testing.assert_close(compiled(*given), softmax_with_sinks(*given))
    assert len(graphs) == 2


@pytest.mark.parametrize("name", few(["bert", "gpt2", "vit"], ["bert"]))
def test_traced_autograd_gives_the_same(name):
    model, inputs = model_and_inputs(name, mask=name != "vit")
    more = {"use_cache": False} if name == "gpt2" else {}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for one, two in zip(outputs(model, inputs, **more), outputs(compiled, inputs, **more), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mask", [False, True], ids=["no-mask", "mask"])
@pytest.mark.parametrize("name", few(["bert", "gpt2", "llama", "vit", "clip"], ["bert", "llama"]))
@pytest.mark.sampled("values")
def test_export(name, mask):
    model, inputs = model_and_inputs(name, mask)
    model.config.use_cache = False
    program = torch.export.export(model, (), kwargs=inputs, strict=False)
    for one, two in zip(outputs(model, inputs), outputs(program.module(), inputs), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-6)


def test_packed_sequences_are_not_mixed_up():
    model, inputs = model_and_inputs("llama", mask=False)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]).expand(3, -1)
    with torch.no_grad():
        together = model(**inputs, position_ids=positions, use_cache=False)[0]
        parts = [model(part, use_cache=False)[0] for part in inputs["input_ids"].split(4, dim=1)]
    torch.testing.assert_close(together, torch.cat(parts, dim=1), rtol=1e-5, atol=1e-5)


def test_packed_sequences_by_their_lengths_are_refused_while_compiled(monkeypatch):
    from linearize.core.errors import UnsupportedModelError

    model, inputs = model_and_inputs("llama", mask=False)
    lengths = torch.tensor([0, 4, 8, 12, 16, 20, 24], dtype=torch.int32)
    with pytest.raises(UnsupportedModelError, match="pad them"), torch.no_grad():
        monkeypatch.setattr("linearize.attention.packing.is_tracing", lambda: True)
        model(**inputs, cu_seq_lens_q=lengths, use_cache=False)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_gradient_checkpointing_gives_the_same_gradients(name):
    grads = []
    for checkpointing in (False, True):
        model, inputs = model_and_inputs(name, mask=True, config={})
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**inputs)[0].square().mean().backward()
        grads.append([p.grad for layer in linear_attentions(model).values() for p in layer.parameters()])
    assert len(grads[0]) >= 4
    for one, two in zip(*grads, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)
