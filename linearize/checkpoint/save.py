"""Save a converted model with its model card: all is written to a temporary folder and renamed when complete.

The card is README.md, with the metadata that the Hub reads.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from torch import nn
from transformers import PreTrainedModel

from linearize import __version__
from linearize.checkpoint.loading import TRANSFORMER, auto_class, load_code, with_length
from linearize.checkpoint.output import atomic_folder
from linearize.checkpoint.ownership import check_links
from linearize.checkpoint.provenance import Provenance, Record
from linearize.conversion.plan import expectations
from linearize.conversion.positions import current_length, extend_processor
from linearize.core.errors import CheckpointError, ConfigError, printable, unknown_name
from linearize.core.figures import span, with_interval
from linearize.core.heads import Processor, head_of_class
from linearize.core.parsing import parse_yaml, read_text
from linearize.core.registry import Values, kernel_info
from linearize.modeling.model import check_checkpoint, config_copied, is_linearized, kernel_parameters
from linearize.modeling.offload import size_of_block, tie
from linearize.modeling.plan import Plan
from linearize.modeling.portable import TRANSFORMERS, outside_packages, why_not
from linearize.modeling.weights import check_merged, is_offloaded

LEAST_SHARD = 250_000_000
"""Bytes of the weights files of an offloaded model with smaller blocks."""
OTHER_FILES = 4_000_000
"""Bytes of a checkpoint's other files: tokenizer, code, card."""
TEMPLATE = Path(__file__).with_name("card.md")
MOST_COMMANDS, LONGEST_COMMAND = 20, 4000
"""Limits on what a checkpoint's record adds to its card, so that a forged record cannot make the card huge."""
_KEPT = ("license", "license_name", "license_link", "language", "base_model")
Facts = Mapping[str, str | list[str]]
"""Metadata of an original's card."""
_MEASURES = ("kl", "total_variation", "negative_share", "output_error")


def size_of(model: PreTrainedModel, *, trained: bool = False) -> int:
    """Return the bytes of a model's checkpoint, within a few per cent; tied weights are written once.

    Args:
        model: the model.
        trained: whether its weights change; offloaded ones are then in another file until the checkpoint is written.
    """
    # Offloaded tensors have no memory; they are not tied.
    sizes = {tensor.data_ptr() or name: tensor.nbytes for name, tensor in model.state_dict().items()}
    return sum(sizes.values()) * (2 if trained and is_offloaded(model) else 1) + OTHER_FILES


def size_of_files(model: PreTrainedModel) -> Values:
    """Return the option of `save_pretrained` for an offloaded model's files, each of which is filled in memory."""
    return {"max_shard_size": max(LEAST_SHARD, size_of_block(model))} if is_offloaded(model) else {}


def save(
    model: PreTrainedModel,
    target: str | os.PathLike[str],
    *,
    processor: Processor | Sequence[Processor | None] | None = None,
    overwrite: bool = False,
    provenance: dict[str, object] | None = None,
    extra_files: Mapping[str, str | bytes] | None = None,
    **kwargs: Any,
) -> Path:
    """Save a converted model with its tokenizer or image processor, a model card and its own code, all or nothing.

    The model in memory stays as it is, with its config.

    Args:
        model: a converted model.
        target: folder to make.
        processor: tokenizer, image processor or feature extractor, or a list of them; saved with the model. Its
            longest input becomes that of `convert(max_length=...)`.
        overwrite: whether a folder that linearize wrote, and that holds nothing else, may be replaced.
        provenance: how the model was made, as plain data; kept in config.json (`linearize.checkpoint.provenance`).
        extra_files: further files of the folder, text or bytes by name; names may contain folders.
        **kwargs: for `save_pretrained` (`max_shard_size` ...).

    Returns:
        The folder.

    Raises:
        CheckpointError: if the model is not converted, or the folder cannot be used or written; nothing is left then.
        ConfigError: if it has an adapter of peft that is not merged.
        UnknownNameError: for an option that neither this function nor `save_pretrained` has.
    """
    _check_known(kwargs)
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(model, nn.Module):
        check_merged(model)
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(f"got {type(model).__name__}, expected a transformers model (PreTrainedModel)")
    if not is_linearized(model):
        raise CheckpointError(f"{type(model).__name__} is not converted; convert it first, or use its save_pretrained")
    processors: Sequence[Any] = processor if isinstance(processor, (list, tuple)) else [processor]
    facts, embedder = base_facts(str(model.config.name_or_path or "")), "modules.json" in (extra_files or {})
    extended = vars(model).get("extended_positions")
    files: Values = dict(extra_files or {})
    if extended is not None and TRANSFORMER in files:
        files = with_length(files, extended.new_length)
    with config_copied(model) as config, atomic_folder(target, overwrite=overwrite) as folder:
        if provenance is not None:
            config.linearize = {**config.linearize, "provenance": provenance}
        card = model_card(model, facts=facts, name=Path(target).name, embedder=embedder)
        tie(model)
        kwargs = size_of_files(model) | kwargs
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
            model.save_pretrained(folder, **kwargs)
        # Refuse what a load would refuse, while the model is still in memory.
        check_checkpoint(folder, variant=kwargs.get("variant"))
        (folder / "README.md").write_text(card, encoding="utf-8")
        write_files(folder, files)
        for item in (item for item in processors if item is not None):
            # Its inputs become as long as those that `convert(max_length=...)` let the model take.
            with contextlib.suppress(ConfigError):
                item = item if extended is None else extend_processor(copy.deepcopy(item), extended, model)
            item.save_pretrained(folder)
    return Path(target)


def _check_known(options: Iterable[str]) -> None:
    """Refuse names that `save_pretrained` would ignore, such as `tokenizer`, which would not be written.

    Raises:
        UnknownNameError: for such a name.
    """
    functions = (save, PreTrainedModel.save_pretrained, PreTrainedModel.push_to_hub)
    known = {name for function in functions for name in signature(function).parameters} - {"self", "kwargs"}
    for name in options:
        # Earlier versions of transformers had it.
        if name not in known and name != "safe_serialization":
            raise unknown_name("option", name, known)


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write text or bytes by name into a folder; names may contain folders."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def base_facts(name: str) -> Facts:
    """Return licence, language and base model from the metadata of the original's card.

    Args:
        name: folder or Hub name that the model was loaded from.

    Returns:
        The facts; empty if there is no card or it cannot be reached.
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
    kept = {}
    for key in _KEPT if isinstance(facts, dict) else ():
        # A name or a list of names; anything else in a card is left out.
        value = facts.get(key)
        names = value if isinstance(value, list) else [value]
        if value and len(names) <= 100 and all(isinstance(text, str) and len(text) <= 300 for text in names):
            kept[key] = value
    return kept


def model_card(model: PreTrainedModel, *, facts: Facts | None = None, name: str = "", embedder: bool = False) -> str:
    """Write the card of a converted model.

    Args:
        model: the model; its config's provenance says how it was made.
        facts: metadata of the original's card (`base_facts`).
        name: name to load the model by: its folder, or later its repository (`linearize.checkpoint.push.with_name`).
        embedder: whether it is saved with the modules of a sentence embedder.

    Returns:
        Markdown.
    """
    config = model.config
    plan = Plan.from_dict(config.linearize)
    provenance = Provenance(config.linearize.get("provenance"))
    base = provenance.text("base_model") or (facts or {}).get("base_model") or config.linearize["base_architecture"]
    kernels = sorted({layer.kernel for layer in plan.converted})
    length = current_length(model)
    tuned = provenance.part("finetuning")
    lines = provenance.texts("commands")
    metrics, original_metrics = tuned.numbers("metrics"), tuned.part("original").numbers("metrics")
    layers = []
    for layer in plan.layers:
        # Attention, kernel, arguments, and why it has that kernel or stays softmax.
        arguments = [_text(f"{key}={value}").replace("\\_", "_") for key, value in layer.arguments.items()]
        arguments += [f"{key}={value}" for key, value in layer.hybrid.changed.items()]
        why = layer.reason if layer.index is None else provenance.reasons.get(layer.index, layer.reason)
        layers.append([_code(layer.module), layer.kernel, ", ".join(filter(None, arguments)), _text(why)])
    shown = json.dumps(printable(name or "THIS_MODEL"), ensure_ascii=False)
    card = ModelCard.from_template(
        _card_data(model, kernels, facts or {}, name, tuned, embedder=embedder),
        template_path=str(TEMPLATE),
        base=_text(base),
        base_code=_code(base),
        embedder=embedder,
        kernels=[kernel_info(kernel) for kernel in kernels],
        links=[url for kernel in kernels if (url := kernel_info(kernel).url)],
        version=__version__,
        name=shown,
        load=load_code(model, shown),
        packages=sorted(set(outside_packages(plan).values())),
        needs=why_not(plan),
        transformers=TRANSFORMERS,
        limits=[_text(text) for text in limits(plan, provenance, length)],
        licensed=bool((facts or {}).get("license")),
        results=[(_text(name), f"{ours:.4g}", _number(original_metrics.get(name))) for name, ours in metrics.items()],
        chance=_number(tuned.number("chance")),
        above_chance=tuned.is_true("above_chance"),
        original_score=any(name in original_metrics for name in metrics),
        commands=[" ".join(printable(line)[:LONGEST_COMMAND].split()) for line in lines[:MOST_COMMANDS]],
        longest="not limited" if length is None else f"{length:,} tokens",
        parameters=f"{sum(parameter.numel() for parameter in kernel_parameters(model)):,}",
        chosen=_text(provenance.search_sentence),
        layers=layers,
        training=[(_text(label), _text(value)) for label, value in provenance.training_rows()],
        fidelity=_fidelity(provenance),
    )
    return f"{str(card).rstrip()}\n"


def limits(plan: Plan, provenance: Provenance, length: int | None) -> list[str]:
    """Return the limits that a user of the model should know, one sentence each.

    Args:
        plan: the plan of the conversion.
        provenance: how the checkpoint was made.
        length: tokens that the model takes; None if unlimited or unknown.
    """
    sentences = ["Short inputs are not faster than with softmax; the gain grows with the length."]
    trained = provenance.longest_row_length
    if trained is not None and length is not None and trained < length:
        sentences.append(
            f"It takes {length:,} tokens; it was trained on rows of up to {trained:,}. Longer rows have not been "
            "measured."
        )
    merit = provenance.numbers("kernel_merit")
    if "error" in merit and "window_only" in merit:
        interval = provenance.part("kernel_merit").interval("interval")
        sentences.append(
            f"After stage one the error of its last hidden state was {merit['error']:.3f}; with its softmax windows "
            f"alone, without the kernel, it was {merit['window_only']:.3f}"
            + ("." if interval is None else f" (the 95 % interval of the difference: {span(interval)}).")
        )
    kept = [layer for layer in plan.layers if not layer.converted]
    if kept:
        sentences.append(f"{len(kept)} of {len(plan.layers)} attentions are still softmax, at its cost.")
    if heads := sum(len(layer.hybrid.softmax_heads) for layer in plan.converted):
        sentences.append(f"Query heads of converted attentions that are still softmax, with all their keys: {heads}.")
    if any(layer.hybrid.routed_blocks for layer in plan.converted):
        sentences.append("Queries look up keys, so all keys are cached: memory grows with the text.")
    sentences += [f"{text[0].upper()}{text[1:]}." for text in expectations(plan)]
    if reason := why_not(plan):
        sentences.append(f"Loading it needs more code: {reason}.")
    return sentences


def _card_data(
    model: PreTrainedModel, kernels: list[str], facts: Facts, called: str, tuned: Record, *, embedder: bool
) -> ModelCardData:
    """Return a card's metadata for the Hub; the original's Hub name takes precedence over its card's facts."""
    head = head_of_class(auto_class(model))
    values: Values = {
        key: [_fact(text) for text in value] if isinstance(value, list) else _fact(value)
        for key, value in facts.items()
    }
    name = str(getattr(model.config, "name_or_path", "") or "")
    if name and not os.path.exists(name) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        values["base_model"] = name
    if metrics := tuned.numbers("metrics"):
        data = _fact(tuned.text("data") or "").partition(":")[0].strip() or "unknown"
        results = [
            EvalResult(
                task_type=head.pipeline_tag if head else "feature-extraction",
                dataset_type=re.sub(r"[^\w./-]", "-", data),
                dataset_name=data,
                metric_type=re.sub(r"\W", "_", printable(metric)),
                metric_value=value,
            )
            for metric, value in metrics.items()
        ]
        values |= {"eval_results": results, "model_name": _fact(called or "THIS_MODEL")}
    library, task = "transformers", head.pipeline_tag if head else None
    tags = ["linearize", "linear-attention", *kernels]
    if embedder:
        library, task = "sentence-transformers", "sentence-similarity"
        tags += [library, "feature-extraction"]
    return ModelCardData(library_name=library, tags=tags, pipeline_tag=task, **values)


def _fidelity(provenance: Provenance) -> dict[str, object] | None:
    """Return head and rows of the table of how close each layer is to softmax, before and after stage one."""
    earlier, later = (provenance.part("distillation").part(side).parts("layers") for side in ("before", "after"))
    if not later or len(earlier) != len(later):
        return None
    names = [name for name in _MEASURES if any(layer.number(name) is not None for layer in later)]
    head = [text for name in names for text in (f"{name.replace('_', ' ')} before", "after")]
    rows = [
        [_code(after.text("module")), *(_number(layer.number(name)) for name in names for layer in (before, after))]
        for before, after in zip(earlier, later, strict=True)
    ]
    if any(layer.number("far_mass") is not None for layer in later):
        head += ["far mass", "output error, window alone", "benefit of the kernel"]
        for row, layer in zip(rows, later, strict=True):
            alone, error = (layer.number(name) for name in ("window_error", "output_error"))
            row += [_number(layer.number("far_mass")), _number(alone), ""]
            if alone is not None and error is not None:
                row[-1] = with_interval(alone - error, layer.interval("kernel_gain"))
    return {"head": head, "rows": rows}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _fact(text: object) -> str:
    """Return a name for the metadata, on one line and without HTML, as some viewers read metadata as Markdown."""
    return " ".join(re.sub("[<>]", "_", printable(str(text))).split())


def _text(value: object) -> str:
    """Escape a text for Markdown, HTML and table cells, on one line."""
    line = " ".join(printable(str(value)).split())
    return re.sub(r"([\\`*_\[\]|#~$!])", r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _code(value: object) -> str:
    """Quote a text with more backticks than it has in a row; escape bars, which would end a table cell."""
    line = " ".join(printable(str(value)).split()).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if line[:1] == "`" or line[-1:] == "`" or not line else ""
    return f"{fence}{space}{line}{space}{fence}"
