"""Parts of one row in several processes equal the whole row in one; what is exchanged does not grow with the row."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.children import context
from support.forks import together
from support.tiny import converted, original

import linearize
from linearize.attention.interface import linear_attentions
from linearize.core.errors import ConfigError
from linearize.modeling import context_parallel

MODELS = ("bert", "roberta", "gpt2", "llama")
JOBS = [(name, hybrid) for name in MODELS for hybrid in context.HYBRIDS]


def test_two_processes_equal_one():
    together(context.main, JOBS[:: len(context.HYBRIDS) + 1])


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_equal_one(count):
    together(context.main, JOBS, count=count)


def sent(tokens, count):
    """The bytes that each process sent, for a causal and a bidirectional layer."""
    said = together(context.long, tokens, count=count)
    return [[int(line.split()[0]) for line in text.splitlines()] for text in said]


def test_what_is_sent_does_not_grow_with_the_row():
    assert sent(300, 2) == sent(3_000, 2)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_a_long_row(count):
    assert sent(131_072, count) == sent(1_024, count)


WORDS = {
    "cache": "got a generation cache (use_cache=True), expected a plain forward",
    "weights": "got attention weights, expected",
    "labels": "got attention_mask, input_ids, labels, expected input_ids and, of other inputs, attention_mask",
    "short": "got 3 tokens for 2 processes, expected at least 2 for each",
    "part": "got a part of 2 tokens, expected at least 3",
    "left": "got padding before or between tokens, expected it at the end of the rows",
    "packed": "got packed rows, expected",
    "{'exact_keys'": "exact-keys=2, expected at most",
    "{'routed_blocks'": "routed-blocks=2:1, expected at most",
    "{'keep_softmax'": "got softmax in layers.0.self_attn, which needs all keys",
    "{'kernel': 'cosformer'": "got kernel 'cosformer'",
    "{'kernel': 'macformer_exp'": "got kernel 'macformer_exp'",
    "{'kernel': 'diag_softmax'": "got kernel 'diag_softmax'",
    "mixing": "it mixes tokens outside of its converted attentions",
}


def test_what_is_not_built_is_refused_in_one_line():
    for said in together(context.refused):
        lines = said.splitlines()
        assert len(lines) == len(WORDS)
        for line, (name, words) in zip(lines, WORDS.items(), strict=True):
            assert line.startswith(name) and words in line and "context parallel" in line, line


def test_one_process_alone_is_refused():
    with pytest.raises(ConfigError, match="expected those of torchrun"), linearize.context_parallel(converted("bert")):
        pass


@pytest.fixture
def alone():
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_modules_keep_their_modes(alone):
    """A frozen part in evaluation mode would otherwise drop out numbers from then on."""
    model = converted("bert").train()
    model.embeddings.eval()
    before = [module.training for module in model.modules()]
    with linearize.context_parallel(model):
        assert [module.training for module in model.modules()] == before


def test_a_block_inside_a_block_is_refused(alone):
    """Its end would end the outer one as well, whose parts would then count as whole rows."""
    model = converted("bert")
    with linearize.context_parallel(model) as outer:
        with pytest.raises(ConfigError, match="got a block inside a block"), linearize.context_parallel(model):
            pass
        assert all(layer.across is outer for layer in linear_attentions(model).values())


def test_a_copy_is_refused(alone):
    """It would still compute parts when the block is over."""
    model = converted("bert")
    with linearize.context_parallel(model), pytest.raises(ConfigError, match="got a copy of the model"):
        copy.deepcopy(model)
    copy.deepcopy(model)


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("kind", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "longrope", **LONG}])
def test_positions_that_change_with_the_length_are_refused(alone, kind):
    """Of a long row, each process would turn its part by another length; the short row that is tried shows nothing."""
    model = linearize.convert(original("llama", rope_parameters={"rope_theta": 1e4, **kind}), "hedgehog")
    words = f"got rotary positions of type '{kind['rope_type']}' in rotary_emb"
    with pytest.raises(ConfigError, match=words), linearize.context_parallel(model):
        pass


def test_a_temperature_by_place_is_refused(alone):
    """Llama 4 counts places itself, from the start of a part, and in the short row that is tried they do not matter."""
    model = converted("llama")
    model.layers[1].self_attn.attn_temperature_tuning = True
    words = r"got a temperature that grows with a token's place in layers\.1\.self_attn"
    with pytest.raises(ConfigError, match=words), linearize.context_parallel(model):
        pass


def test_a_second_derivative_is_refused(alone):
    """It would leave out what other processes make of this part."""
    x = torch.ones(3, requires_grad=True)
    every = context_parallel._Gather.apply(x, None)
    (grad,) = torch.autograd.grad(every.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
