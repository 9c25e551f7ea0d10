"""The model card of a converted model: README.md, with the facts that the Hub reads in front."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import PreTrainedModel

from linearize.checkpoint.inspect import training_rows
from linearize.errors import printable
from linearize.heads import HEADS, head_of_class
from linearize.modeling.model import kernel_parameters
from linearize.modeling.plan import Plan
from linearize.parsing import parse_yaml
from linearize.registry import kernel_info

_KEPT = ("license", "license_name", "license_link", "language", "base_model")
_FIGURES = ("kl", "total_variation", "negative_share", "output_error")


def base_facts(name: str) -> dict[str, Any]:
    """Read what the original's own card says in front: licence, language.

    Args:
        name: folder or Hub name that the model was loaded from.

    Returns:
        What was found; empty where there is no card or it cannot be reached.
    """
    if not name:
        return {}
    try:
        folder = Path(name)
        path = folder / "README.md" if folder.is_dir() else Path(hf_hub_download(name, "README.md", etag_timeout=5))
        match = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", path.read_text(encoding="utf-8"), re.DOTALL)
        facts = parse_yaml(match[1]) if match else {}
    except (OSError, ValueError, HfHubHTTPError, HFValidationError):
        return {}
    return {key: facts[key] for key in _KEPT if _is_fact(facts.get(key))} if isinstance(facts, dict) else {}


def _is_fact(value: Any) -> bool:
    """Whether a value is a name or a list of names; whatever else a card says is not taken over."""
    values = value if isinstance(value, list) else [value]
    return bool(value) and len(values) <= 100 and all(isinstance(one, str) and len(one) <= 300 for one in values)


def _text(value: Any) -> str:
    """Escape a text for Markdown, HTML and cells of tables, on one line."""
    line = " ".join(printable(str(value)).split())
    return re.sub(r"([\\`*_\[\]|#~$!])", r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _code(value: Any) -> str:
    """Put a text between backticks, more of them than it has in a row; a table's cell ends at no bar in it."""
    line = " ".join(printable(str(value)).split()).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    room = " " if line[:1] == "`" or line[-1:] == "`" or not line else ""
    return f"{fence}{room}{line}{room}{fence}"


def model_card(model: PreTrainedModel, *, facts: Mapping[str, Any] | None = None) -> str:
    """Write the card of a converted model.

    Args:
        model: the model; its config's provenance says how it was made.
        facts: what the original's card says in front (`base_facts`).

    Returns:
        Markdown.
    """
    config: Any = model.config
    plan = Plan.from_dict(config.linearize)
    provenance = config.linearize.get("provenance") or {}
    head = head_of_class(type(model).__name__)
    base = provenance.get("base_model") or (facts or {}).get("base_model") or config.linearize["base_architecture"]
    front = _front(model, plan, head.pipeline_tag if head else None, dict(facts or {}))
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n",
        f"# {_text(base)} with linear attention\n",
        f"The softmax attention of {_code(base)} was replaced with linear attention by `linearize`: time and memory "
        "grow linearly with the input.\n",
        _usage((head or HEADS["feature-extraction"]).auto_class),
        _kernels(plan),
        _layers(model, plan),
        _training(provenance),
    ]
    return "\n".join(part for part in parts if part)


def _front(model: PreTrainedModel, plan: Plan, task: str | None, facts: dict[str, Any]) -> dict[str, Any]:
    kernels = sorted({layer.kernel for layer in plan.converted})
    front = {"library_name": "transformers", "tags": ["linearize", "linear-attention", *kernels]} | facts
    name = str(getattr(model.config, "name_or_path", "") or "")
    if name and not os.path.exists(name) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        front["base_model"] = name
    return front | ({"pipeline_tag": task} if task else {})


def _usage(auto: str) -> str:
    return (
        "## Load\n\n```python\n"
        f"from transformers import {auto}\n"
        "import linearize  # or, without it: trust_remote_code=True\n"
        f'model = {auto}.from_pretrained("THIS_MODEL")\n'
        "```\n"
    )


def _kernels(plan: Plan) -> str:
    lines = ["## Kernels\n"]
    for name in sorted({layer.kernel for layer in plan.converted}):
        info = kernel_info(name)
        lines.append(f"- **{name}**: {info.summary}. [{info.source}]({info.url})\n\n  `{info.formula}`\n")
    return "\n".join(lines)


def _layers(model: PreTrainedModel, plan: Plan) -> str:
    from linearize.surgery.positions import current_length

    length = current_length(model)
    added = sum(parameter.numel() for parameter in kernel_parameters(model))
    lines = [
        "## Layers\n",
        f"Longest input: {'not limited' if length is None else f'{length:,} tokens'}. "
        f"The kernels add {added:,} learnable parameters.\n",
        "| attention | kernel | arguments | why not |",
        "| --- | --- | --- | --- |",
    ]
    for layer in plan.layers:
        arguments = ", ".join(_text(f"{key}={value}").replace("\\_", "_") for key, value in layer.arguments.items())
        window = f"window={layer.window}" if layer.window else ""
        given = ", ".join(text for text in (arguments, window) if text)
        lines.append(f"| {_code(layer.module)} | {layer.kernel} | {given} | {_text(layer.reason)} |")
    return "\n".join(lines) + "\n"


def _training(provenance: Mapping[str, Any]) -> str:
    rows = training_rows(dict(provenance))
    if not rows:
        return "## Training\n\nThe kernels are as they start: they were not trained.\n"
    lines = [
        "## Training\n",
        "| | |",
        "| --- | --- |",
        *(f"| {_text(label)} | {_text(value)} |" for label, value in rows),
    ]
    return "\n".join(lines) + "\n\n" + _fidelity(provenance)


def _fidelity(provenance: Mapping[str, Any]) -> str:
    """Write one line per layer: how close its attention is to softmax, before and after stage one."""
    distilled = provenance.get("distillation")
    if not isinstance(distilled, dict):
        return ""
    before, after = (((distilled.get(side) or {}).get("layers") or []) for side in ("before", "after"))
    if not after or len(before) != len(after):
        return ""
    names = [name for name in _FIGURES if any(layer.get(name) is not None for layer in after)]
    head = " | ".join(f"{name.replace('_', ' ')} before | after" for name in names)
    lines = ["## Fidelity to softmax\n", f"| attention | {head} |", "| --- " * (1 + 2 * len(names)) + "|"]
    for one, two in zip(before, after, strict=True):
        figures = " | ".join(f"{_number(one.get(name))} | {_number(two.get(name))}" for name in names)
        lines.append(f"| {_code(two.get('module'))} | {figures} |")
    return "\n".join(lines) + "\n"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else ""
