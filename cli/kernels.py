"""Run `kernels`: list them, explain one, or list those that fit a model."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

from linearize.attention.factory import build_mixer, count_parameters, sums_bytes
from linearize.attention.shape import HeadShape
from linearize.cli._output import ROOMY, Screen, shown, table
from linearize.core.errors import ConfigError
from linearize.core.registry import KernelInfo, ReadOnlyValues, Values, kernel_info, kernel_infos
from linearize.evaluation.bench import measured
from linearize.evaluation.bench.measured import CAUSAL, FORWARD, SPEED, default_quality
from linearize.evaluation.bench.rows import mebibytes

FLAGS = ("learnable", "positive", "normalized", "random", "positional", "causal", "bidirectional", "streamable")
LIMITS = ("low", "high", "multiple_of", "choices")
"""The limits on an argument's values in `linearize.core.registry.option`."""
LONG = 4096
"""Longest input for kernels that need a maximum, if the model has no limit."""
BERT_BASE = [HeadShape(12, 12, 64, 64, False)] * 12


def describe(info: KernelInfo) -> Values:
    """Return a kernel's facts as plain data; sizes are for BERT-base's heads and default arguments."""
    config, row, name = info.config(), _row(info, {}, BERT_BASE, FORWARD), info.name
    arguments = [
        {
            "name": f.name,
            "default": f.default,
            "help": f.metadata.get("help", ""),
            **{key: f.metadata[key] for key in LIMITS if f.metadata.get(key) is not None},
        }
        for f in fields(info.config)
    ]
    where = {key: {"key": key, "what": what, "source": source} for key, (what, source) in measured.EXPERIMENTS.items()}
    return {
        **{name: getattr(info, name) for name in ("name", "summary", "formula", "source", "url", "choose")},
        "quality": [asdict(one) | {"experiment": where[one.experiment]} for one in measured.quality_of(name)],
        "speed": [
            {"kernel": name, "what": what, "tokens": tokens, "times": times[name]}
            for what, (tokens, times) in SPEED.items()
            if name in times
        ],
        "speed_source": measured.SPEED_SOURCE,
        "feature_size": row["features"],
        "state_bytes_bert_base": row["state_bytes"],
        "extra_parameters_bert_base": row["parameters"],
        "parameters_per_head": info.parameters_formula,
        **{flag: getattr(info, flag) for flag in FLAGS},
        "positive": info.is_positive(config),
        "learnable": info.is_learnable(config),
        "arguments": arguments,
        "stage_one": asdict(info.training(config)),
    }


def kernels(args: argparse.Namespace, out: Screen) -> object:
    """Print the table, one kernel, or the table for a model.

    Raises:
        ConfigError: if both a kernel and a model are given.
    """
    if args.model:
        if args.name:
            raise ConfigError(f"kernels: got the kernel {args.name!r} and --for, expected one of them; drop one")
        return _list_for(args.model, out, as_json=args.json)
    if args.json:
        return describe(kernel_info(args.name)) if args.name else [describe(info) for info in kernel_infos()]
    if args.name:
        _explain(describe(kernel_info(args.name)), out)
    else:
        rows = [_row(info, {}, BERT_BASE, FORWARD) for info in kernel_infos()]
        _print(f"{len(rows)} kernels (sizes for BERT-base: 12 layers, 12 heads, head size 64)", rows, out)
    return None


COLUMNS = ["kernel", "features", "parameters", "state, MiB", "KL", "faster", "choose it"]
NARROW = (0, 4, 5, 6)
"""Columns for a narrow terminal; `kernels NAME` shows the others."""


def _print(title: str, rows: Sequence[ReadOnlyValues], out: Screen) -> None:
    """Print kernels from `_row`, and the sources of their figures."""
    kept = range(len(COLUMNS)) if out.width >= ROOMY else NARROW
    cells = [
        [
            row["name"],
            row["features"] or "-",
            f"{row['parameters']:,}",
            mebibytes(row["state_bytes"], 2),
            "-" if row["kl"] is None else f"{row['kl']:.3f} {row['experiment']}",
            shown(row["times_faster"], "{:.1f} x"),
            row["choose"],
        ]
        for row in rows
    ]
    columns = [COLUMNS[place] for place in kept]
    lines = [[row[place] for place in kept] for row in cells]
    out.print(table(title, columns, lines, right=tuple(range(1, len(columns) - 1))))
    for key, (what, source) in measured.EXPERIMENTS.items():
        out.print(f"KL {key}: {what} ({source}).")
    out.print(f"Faster: {FORWARD} at {SPEED[FORWARD][0]:,} tokens, or causal ({measured.SPEED_SOURCE}).")


def _row(info: KernelInfo, arguments: Mapping[str, object], shapes: Sequence[HeadShape], what: str) -> Values:
    """Return a row of the table: sizes in attentions of these shapes, and figures measured with default arguments."""
    config, size = info.config(**arguments), max(shape.head_dim for shape in shapes)
    quality = default_quality(info.name)
    return {
        "name": info.name,
        "features": None if info.feature_dim is None else info.feature_dim(config, size),
        "parameters": sum(count_parameters(info.name, arguments, *shape) for shape in Counter(shapes).items()),
        "state_bytes": sums_bytes(info, config, shapes),
        "kl": None if quality is None else quality.kl,
        "experiment": None if quality is None else quality.experiment,
        "times_faster": SPEED[what][1].get(info.name),
        "choose": info.choose or info.summary,
    }


def _list_for(model: str, out: Screen, *, as_json: bool) -> dict[str, object]:
    """Print the kernels that fit a model, with their sizes in it, the closest to softmax first."""
    from linearize.checkpoint.inspect import inspect_checkpoint
    from linearize.checkpoint.loading import load_model
    from linearize.conversion.plan import plan

    info = inspect_checkpoint(model)
    layers = [layer for layer in (info.plan or plan(load_model(model).model, "elu")).layers if layer.index is not None]
    longest = info.max_length
    shapes = [layer.shape for layer in layers]
    causal = any(shape.causal for shape in shapes)
    rows, refused = [], {}
    for kernel in (kernel for kernel in kernel_infos() if kernel.preset is None):
        arguments: dict[str, object] = {"max_positions": longest or LONG} if kernel.maximum_positions else {}
        try:
            for shape in dict.fromkeys(shapes):
                build_mixer(kernel.name, arguments, shape)
        except ConfigError as error:
            refused[kernel.name] = str(error)
            continue
        rows.append(_row(kernel, arguments, shapes, CAUSAL if causal else FORWARD))
    # Figures of different experiments are not comparable; within an experiment the closest comes first.
    rows.sort(key=lambda row: (row["experiment"] or "z", row["kl"] or 0.0, row["name"]))
    sizes = sorted({shape.head_dim for shape in shapes})
    if not as_json:
        takes = "any number of" if longest is None else f"{longest:,}"
        heads = f"heads of size {', '.join(map(str, sizes))}"
        direction = "causal" if causal else "bidirectional"
        _print(f"{model}: {len(layers)} attentions, {direction}, {heads}, takes {takes} tokens", rows, out)
        for name, why in refused.items():
            out.print(f"{name} does not fit: {why}")
    facts = {"model": model, "attentions": len(layers), "causal": causal, "head_dims": sizes, "longest": longest}
    return facts | {"kernels": rows, "refused": refused}


def _explain(facts: Values, out: Screen) -> None:
    """Print everything about one kernel."""
    size = (
        f"{facts['feature_size'] or 'no'} features, {facts['parameters_per_head']} parameters per head and layer "
        f"({facts['extra_parameters_bert_base']:,} for BERT-base); state of BERT-base: "
        f"{mebibytes(facts['state_bytes_bert_base'], 2)} MiB"
    )
    lines = [(label, facts[key]) for label, key in (("choose it", "choose"), ("formula", "formula"))]
    lines += [("source", facts["source"]), ("paper", facts["url"])]
    lines += [("is", ", ".join(flag for flag in FLAGS if facts[flag])), ("size", size)]
    for one in facts["quality"]:
        arguments = ", ".join(f"{name}={value}" for name, value in one["arguments"].items())
        score = "" if one["score"] is None else f"; {one['score']:.1f} % of softmax's score after the alignment"
        where = f"{one['experiment']['what']}{score} ({one['experiment']['source']})"
        lines.append(("quality", f"{arguments and f'{arguments}: '}KL {one['kl']:.3f}, {where}"))
    for one in facts["speed"]:
        lines.append(("speed", f"{one['what']} at {one['tokens']:,} tokens: {one['times']:g} times faster"))
    out.print(f"{facts['name']}: {facts['summary']}")
    for label, text in lines:
        out.print(f"  {label:<11}{text}")
    rows = []
    for argument in facts["arguments"]:
        values = "true | false" if isinstance(argument["default"], bool) else ""
        if "choices" in argument:
            values = " | ".join(map(str, argument["choices"]))
        elif "low" in argument or "high" in argument:
            step = f", multiples of {argument['multiple_of']}" if "multiple_of" in argument else ""
            values = f"{argument.get('low', '')} .. {argument.get('high', '')}{step}"
        rows.append([argument["name"], argument["default"], values, argument["help"]])
    if rows:
        out.print(table("arguments (--kernel-arg NAME=VALUE)", ["name", "default", "values", "what"], rows))
    if facts["learnable"]:
        out.print(table("stage one, by default", ["option", "value"], list(facts["stage_one"].items())))
