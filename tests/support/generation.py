"""Generation held against full forwards without a cache, in fp64."""

from __future__ import annotations

import contextlib
import copy
import functools

import torch

from linearize.attention.interface import linear_attentions
from support.rounding import allowed, deviation
from support.tiny import converted

GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def causal(name: str, kernel: str = "hedgehog", **options):
    """Convert a tiny language model."""
    return converted(name, "AutoModelForCausalLM", kernel, **options)


def prompts(batch: int = 3, tokens: int = 9, padded: bool = True):
    """Prompts with padding on the left of the first."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 96, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :4], mask[0, :4] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def full_logits(model, inputs, made, mode=None):
    """Return the logits of one full forward over a text, without a cache, [B, T, V]."""
    given = dict(inputs)
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = made
    else:
        mask = given.get("attention_mask", torch.ones_like(made))
        new = made.shape[1] - mask.shape[1]
        given["attention_mask"] = torch.cat([mask, mask.new_ones(len(made), new)], dim=1)
        given["position_ids"] = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        given["input_ids"] = made
    with torch.no_grad(), mode or contextlib.nullcontext():
        return model(**given, use_cache=False).logits


def written_out(mixer, call):
    """Mix a call's values by weights that are written out, and return the output without a state."""
    weights = mixer.weights(call.q, call.k, scaling=call.scaling, key_padding_mask=call.key_padding_mask)
    groups = call.q.shape[1] // call.k.shape[1]
    return mixer.apply_output(weights.to(call.v.dtype) @ call.v.repeat_interleave(groups, dim=1)), None


def bounded_logits(model, inputs, made, steps):
    """Return what a model's logits are without rounding before each of a text's last tokens, and what fp32 may miss.

    Args:
        model: in fp32; it stays as it is.
        inputs: of the generation.
        made: the whole text, [B, T]; for encoder-decoders the decoder's.
        steps: how many of its tokens were generated.

    Returns:
        Logits of full forwards in fp64, [B, steps, V], and the bound of `rounding.allowed`.
    """
    model = copy.deepcopy(model).double()
    for layer in linear_attentions(model).values():
        layer.mixer.forward = functools.partial(written_out, layer.mixer)
    weights = list(model.parameters())

    def function(mode, *values):
        for mine, value in zip(weights, values, strict=True):
            mine.data = value
        return [full_logits(model, inputs, made[:, :-1], mode)[:, -steps:]]

    # Sums over widths, and in each attention over tokens.
    terms = sum(max(x.shape[-2:]) for x in weights if x.ndim > 1) + len(linear_attentions(model)) * made.shape[1]
    (exact,), (moves,) = deviation(function, [x.detach() for x in weights])
    return exact, allowed(moves, terms)


def assert_same_text(model, inputs, made, scores, greedy=True):
    """Hold what was generated, and its logits, against full forwards over the same text, within fp32's rounding.

    Every text is judged by itself: where two tokens are all but level, two ways to compute may rightly choose each
    another one.

    Args:
        model: that generated.
        inputs: of the generation.
        made: the whole texts, [B, T].
        scores: logits of each new token, [B, V] each.
        greedy: whether each new token is the likeliest.
    """
    got = torch.stack(list(scores), dim=1)
    exact, bound = bounded_logits(model, inputs, made, len(scores))
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=bound)
    if greedy:
        assert torch.equal(made[:, -len(scores) :], got.argmax(-1))


def assert_same_beams(model, inputs, **options):
    """Hold the scores of beams against full forwards over their texts, and against beams without a cache; return them.

    Nearly level beams may rightly come in another order, so that scores are compared, not tokens.
    """
    options |= {"return_dict_in_generate": True, "output_scores": True}
    out, plain = (model.generate(**inputs, **options, use_cache=use_cache) for use_cache in (True, False))
    times = len(out.sequences) // len(next(iter(inputs.values())))
    repeated = {key: x.repeat_interleave(times, dim=0) for key, x in inputs.items()}
    exact, bound = bounded_logits(model, repeated, out.sequences, len(out.scores))
    chosen = out.sequences[:, -len(out.scores) :, None]
    expected = exact.log_softmax(-1).gather(-1, chosen)[..., 0].mean(-1)
    # A logarithm of a softmax differs by twice what logits differ by.
    torch.testing.assert_close(out.sequences_scores.double(), expected, rtol=0, atol=2 * bound)
    torch.testing.assert_close(out.sequences_scores, plain.sequences_scores, rtol=0, atol=4 * bound)
    return out


def generate_and_check(model, inputs, greedy=True, **options):
    """Generate, hold the text against full forwards, and return what `generate` gives."""
    out = model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
    assert_same_text(model, inputs, out.sequences, out.logits, greedy)
    return out
