"""Parts of one row in several processes equal the whole row in one; what is exchanged does not grow with the row."""

import pytest
from support.children import context
from support.forks import together
from support.tiny import converted

import linearize
from linearize.core.errors import ConfigError

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
