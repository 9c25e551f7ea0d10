"""The model card of a converted model: README.md, with the facts that the Hub reads in front."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import PreTrainedModel

from linearize.checkpoint.card_facts import chance_level, commands, eval_results, fact, limits, results
from linearize.checkpoint.chosen import PlanPoint, points, reasons, sentence
from linearize.checkpoint.inspect import training_rows
from linearize.checkpoint.ownership import check_links
from linearize.errors import CheckpointError, printable
from linearize.heads import HEADS, Head, head_of_class
from linearize.modeling.model import kernel_parameters
from linearize.modeling.plan import LayerPlan, Plan
from linearize.modeling.portable import why_not
from linearize.parsing import parse_yaml, read_text
from linearize.registry import kernel_info
from linearize.surgery.positions import current_length

_KEPT = ("license", "license_name", "license_link", "language", "base_model")
TEMPLATE = Path(__file__).with_name("card.md")
_MEASURES = ("kl", "total_variation", "negative_share", "output_error")


def base_facts(name: str) -> dict[str, str | list[str]]:
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
        check_links(folder)
        path = folder / "README.md" if folder.is_dir() else Path(hf_hub_download(name, "README.md", etag_timeout=5))
        match = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", read_text(path), re.DOTALL)
        facts = parse_yaml(match[1]) if match else {}
    except (OSError, ValueError, CheckpointError, HfHubHTTPError, HFValidationError):
        return {}
    return {key: facts[key] for key in _KEPT if _is_fact(facts.get(key))} if isinstance(facts, dict) else {}


def _is_fact(value: object) -> bool:
    """Whether a value is a name or a list of names; whatever else a card says is not taken over."""
    values = value if isinstance(value, list) else [value]
    return bool(value) and len(values) <= 100 and all(isinstance(one, str) and len(one) <= 300 for one in values)


def _text(value: object) -> str:
    """Escape a text for Markdown, HTML and cells of tables, on one line."""
    line = " ".join(printable(str(value)).split())
    return re.sub(r"([\\`*_\[\]|#~$!])", r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _code(value: object) -> str:
    """Put a text between backticks, more of them than it has in a row; a table's cell ends at no bar in it."""
    line = " ".join(printable(str(value)).split()).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if line[:1] == "`" or line[-1:] == "`" or not line else ""
    return f"{fence}{space}{line}{space}{fence}"


def model_card(model: PreTrainedModel, *, facts: Mapping[str, str | list[str]] | None = None, name: str = "") -> str:
    """Write the card of a converted model.

    Args:
        model: the model; its config's provenance says how it was made.
        facts: what the original's card says in front (`base_facts`).
        name: what it is loaded by: its folder, or later its repository (`linearize.checkpoint.push.with_name`).

    Returns:
        Markdown.
    """
    config: Any = model.config
    plan = Plan.from_dict(config.linearize)
    provenance = config.linearize.get("provenance") or {}
    head = head_of_class(type(model).__name__)
    base = provenance.get("base_model") or (facts or {}).get("base_model") or config.linearize["base_architecture"]
    measured = results(provenance)
    card = ModelCard.from_template(
        _card_data(model, plan, head, facts or {}, name, provenance),
        template_path=str(TEMPLATE),
        base=_text(base),
        base_code=_code(base),
        auto_class=(head or HEADS["feature-extraction"]).auto_class,
        kernels=[kernel_info(name) for name in _kernels(plan)],
        name=json.dumps(printable(name or "THIS_MODEL"), ensure_ascii=False),
        needs=why_not(plan),
        limits=[_text(text) for text in limits(plan, provenance, current_length(model))],
        results=[(_text(metric), f"{ours:.4g}", _number(theirs)) for metric, ours, theirs in measured],
        chance=chance_level(provenance),
        original_score=any(theirs is not None for _, _, theirs in measured),
        commands=commands(provenance),
        longest=_longest(model),
        parameters=f"{sum(parameter.numel() for parameter in kernel_parameters(model)):,}",
        chosen=_text(sentence(provenance)),
        points=[_point(one) for one in points(provenance)],
        layers=[_layer(layer, reasons(provenance)) for layer in plan.layers],
        training=[(_text(label), _text(value)) for label, value in training_rows(dict(provenance))],
        fidelity=_fidelity(provenance),
    )
    return f"{str(card).rstrip()}\n"


def _kernels(plan: Plan) -> list[str]:
    return sorted({layer.kernel for layer in plan.converted})


def _card_data(
    model: PreTrainedModel,
    plan: Plan,
    head: Head | None,
    facts: Mapping[str, str | list[str]],
    called: str,
    provenance: Mapping[str, object],
) -> ModelCardData:
    """Return what the Hub reads in front of a card; a Hub name of the original goes before its card's own facts."""
    values: dict[str, Any] = {key: _plain(value) for key, value in facts.items()}
    name = str(getattr(model.config, "name_or_path", "") or "")
    if name and not os.path.exists(name) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        values["base_model"] = name
    measured = eval_results(provenance, head.pipeline_tag if head else "feature-extraction")
    if measured:
        values |= {"eval_results": measured, "model_name": fact(called or "THIS_MODEL")}
    return ModelCardData(
        library_name="transformers",
        tags=["linearize", "linear-attention", *_kernels(plan)],
        pipeline_tag=head.pipeline_tag if head else None,
        **values,
    )


def _plain(value: str | list[str]) -> str | list[str]:
    return [fact(one) for one in value] if isinstance(value, list) else fact(value)


def _longest(model: PreTrainedModel) -> str:
    length = current_length(model)
    return "not limited" if length is None else f"{length:,} tokens"


def _point(one: PlanPoint) -> list[str]:
    """Return the cells of a plan that a search has tried; a star where nothing is closer and cheaper."""
    star = " \\*" if one.efficient else ""
    return [f"{_text(one.name)}{star}", _text(one.kernels), f"{one.error:.4g}", f"{one.share:.3g}"]


def _layer(layer: LayerPlan, why: Mapping[int, str]) -> list[str]:
    """Return the cells of a layer: its attention, kernel and arguments, and why it has that, or was left alone."""
    arguments = [_text(f"{key}={value}").replace("\\_", "_") for key, value in layer.arguments.items()]
    arguments += [f"{key}={value}" for key, value in layer.hybrid.changed.items()]
    said = layer.reason if layer.index is None else why.get(layer.index, layer.reason)
    return [_code(layer.module), layer.kernel, ", ".join(filter(None, arguments)), _text(said)]


def _fidelity(provenance: Mapping[str, object]) -> dict[str, object] | None:
    """Return head and rows of a table: how close each layer's attention is to softmax, before and after stage one."""
    distilled = provenance.get("distillation")
    if not isinstance(distilled, dict):
        return None
    before, after = (((distilled.get(side) or {}).get("layers") or []) for side in ("before", "after"))
    if not after or len(before) != len(after):
        return None
    names = [name for name in _MEASURES if any(layer.get(name) is not None for layer in after)]
    head = [text for name in names for text in (f"{name.replace('_', ' ')} before", "after")]
    rows = [
        [_code(two.get("module")), *(_number(layer.get(name)) for name in names for layer in (one, two))]
        for one, two in zip(before, after, strict=True)
    ]
    return {"head": head, "rows": rows}


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else ""
