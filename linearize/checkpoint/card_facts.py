"""What the model card says beside the plan: limits, results beside the original's, the commands that made it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from huggingface_hub import EvalResult

from linearize.checkpoint.chosen import mapping, number
from linearize.checkpoint.taught import longest_taught
from linearize.errors import printable
from linearize.modeling.plan import Plan
from linearize.modeling.portable import why_not
from linearize.surgery.plan import expectations

MOST_COMMANDS, LONGEST_COMMAND = 20, 4000
"""Of what a checkpoint says of itself, so that a made-up one cannot make a card of any size."""


def fact(text: object) -> str:
    """Return a name for the front of a card, on one line and without HTML, for viewers that take it for Markdown."""
    return " ".join(re.sub("[<>]", "_", printable(str(text))).split())


def results(provenance: Mapping[str, object]) -> list[tuple[str, float, float | None]]:
    """Return (metric, this model's, the original's) of stage two; the original's is that of its own record."""
    tuned = provenance.get("finetuning")
    if not isinstance(tuned, dict):
        return []
    theirs = mapping(mapping(tuned.get("original")).get("metrics"))
    metrics = mapping(tuned.get("metrics"))
    return [
        (str(name), found, number(theirs.get(name)))
        for name, value in metrics.items()
        if (found := number(value)) is not None
    ]


def chance_level(provenance: Mapping[str, object]) -> str:
    """Say what guessing reaches on the task of stage two, and whether the model is above it; empty if not recorded."""
    tuned = mapping(provenance.get("finetuning"))
    chance = number(tuned.get("chance"))
    if chance is None:
        return ""
    below = "" if tuned.get("above_chance") else " This model is not above it."
    return f"Chance, the best answer that looks at no input, reaches a score of {chance:.4g}.{below}"


def eval_results(provenance: Mapping[str, object], task_type: str) -> list[EvalResult]:
    """Return the results as the Hub's model index has them."""
    tuned = provenance.get("finetuning") or {}
    data = fact(tuned.get("data") if isinstance(tuned, dict) else "").partition(":")[0].strip() or "unknown"
    return [
        EvalResult(
            task_type=task_type,
            dataset_type=re.sub(r"[^\w./-]", "-", data),
            dataset_name=data,
            metric_type=re.sub(r"\W", "_", printable(name)),
            metric_value=value,
        )
        for name, value, _ in results(provenance)
    ]


def limits(plan: Plan, provenance: Mapping[str, object], length: int | None) -> list[str]:
    """Return what a user of the model has to know of where it ends, one sentence each.

    Args:
        plan: the plan of the conversion.
        provenance: how it was made, as the checkpoint says.
        length: tokens that it takes; None: not limited or not known.
    """
    kept = [layer for layer in plan.layers if not layer.converted]
    found = ["Short inputs are not faster than with softmax; the gain grows with the length."]
    seen = longest_taught(provenance)
    if seen is not None and length is not None and seen < length:
        found.append(
            f"It takes {length:,} tokens; it was taught and measured on rows of up to {seen:,}. Beyond these it has "
            "not been measured."
        )
    merit = provenance.get("kernel_merit")
    if isinstance(merit, dict) and all(isinstance(merit.get(name), float) for name in ("error", "window_only")):
        found.append(
            f"After stage one the error of its last hidden state was {merit['error']:.3f}; with its softmax windows "
            f"alone, without the kernel, it was {merit['window_only']:.3f}."
        )
    if kept:
        found.append(f"{len(kept)} of {len(plan.layers)} attentions are softmax still, with its cost.")
    found += [f"{text[0].upper()}{text[1:]}." for text in expectations(plan)]
    stays = why_not(plan)
    if stays:
        found.append(f"It does not run by itself: {stays}. Install and import what registers that kernel first.")
    return found


def commands(provenance: Mapping[str, object]) -> list[str]:
    """Return the command lines that made the checkpoint, in order."""
    said = provenance.get("commands")
    if not isinstance(said, list) or not all(isinstance(line, str) for line in said):
        return []
    return [" ".join(printable(line)[:LONGEST_COMMAND].split()) for line in said[:MOST_COMMANDS]]
