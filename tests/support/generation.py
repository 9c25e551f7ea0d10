"""Greedy generation held against full forwards without a cache."""

from __future__ import annotations

import torch

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


def greedy_without_cache(model, input_ids, attention_mask, steps):
    """Grow the text by one full forward per token; also returns the logits of each step."""
    logits = []
    for _ in range(steps):
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            out = model(input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False)
        logits.append(out.logits[:, -1])
        input_ids = torch.cat([input_ids, logits[-1].argmax(-1, keepdim=True)], dim=1)
        attention_mask = torch.cat([attention_mask, torch.ones_like(attention_mask[:, :1])], dim=1)
    return input_ids, logits


def assert_same_text(model, inputs, made, scores):
    """Hold what was generated, and its logits, against full forwards."""
    want, logits = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], len(scores))
    for got, expected in zip(scores, logits, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    assert torch.equal(made, want)
