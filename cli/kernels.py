"""Run `kernels`: list them, explain one, or advise on the kernel for a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from linearize.attention.factory import count_parameters, state_bytes
from linearize.attention.shape import HeadShape
from linearize.cli._output import ROOMY, console, print_json, table
from linearize.core.errors import ConfigError
from linearize.core.registry import KernelInfo, kernel_info, kernel_infos
from linearize.evaluation.bench.measured import (
    EXPERIMENTS,
    FORWARD,
    SPEED,
    SPEED_SOURCE,
    default_quality,
    quality_of,
    speed_of,
)

FLAGS = ("learnable", "positive", "normalized", "random", "positional", "causal", "bidirectional", "streamable")
LIMITS = ("low", "high", "multiple_of", "choices")
"""What `linearize.core.registry.option` may say of an argument's values."""
BERT_BASE = {"layers": 12, "heads": 12, "head_dim": 64}


def describe(info: KernelInfo) -> dict[str, Any]:
    """Return a kernel's facts as plain data, with sizes for BERT-base's heads and default arguments."""
    config, size = info.config(), BERT_BASE["head_dim"]
    shape = HeadShape(BERT_BASE["heads"], BERT_BASE["heads"], size, size, False)
    arguments = [
        {
            "name": f.name,
            "default": f.default,
            "help": f.metadata.get("help", ""),
            **{key: f.metadata[key] for key in LIMITS if f.metadata.get(key) is not None},
        }
        for f in fields(info.config)
    ]
    features = None if info.feature_dim is None else info.feature_dim(config, size)
    return {
        "name": info.name,
        "summary": info.summary,
        "formula": info.formula,
        "source": info.source,
        "url": info.url,
        "choose": info.choose,
        "quality": [asdict(one) for one in quality_of(info.name)],
        "speed": [asdict(one) for one in SPEED if one.kernel == info.name],
        "speed_source": SPEED_SOURCE,
        "feature_size": features,
        "state_bytes_bert_base": state_bytes(info, config, [shape] * BERT_BASE["layers"]),
        "extra_parameters_bert_base": count_parameters(info.name, {}, shape, BERT_BASE["layers"]),
        "parameters_per_head": info.parameters_formula,
        **{flag: getattr(info, flag) for flag in FLAGS},
        "positive": info.is_positive(config),
        "arguments": arguments,
        "stage_one": asdict(info.training(config)),
    }


def kernels(args: argparse.Namespace) -> None:
    """Print the table, one kernel, or the advice."""
    if args.model:
        if args.name:
            raise ConfigError(f"kernels: got the kernel {args.name!r} and --for, expected one of them; drop one")
        _advise(args.model, as_json=args.json)
        return
    facts = [describe(info) for info in ([kernel_info(args.name)] if args.name else kernel_infos())]
    if args.json:
        print_json(facts[0] if args.name else facts)
    elif args.name:
        _explain(facts[0])
    else:
        _list(facts)


COLUMNS = ["kernel", "features", "parameters", "state, MiB", "KL", "faster", "choose it"]
NARROW = (0, 4, 5, 6)
"""Columns for a narrow terminal; `kernels NAME` shows the others."""


def _print(title: str, rows: Sequence[Sequence[Any]]) -> None:
    """Print kernels, and where their figures come from.

    Args:
        title: of the table.
        rows: name, features, parameters, bytes of the state, nats, experiment, times faster, advice.
    """
    out = console()
    kept = range(len(COLUMNS)) if out.width >= ROOMY else NARROW
    cells = [
        [
            name,
            features or "-",
            f"{parameters:,}",
            _mebibytes(state),
            "-" if kl is None else f"{kl:.3f} {experiment}",
            "-" if times is None else f"{times:.1f} x",
            choose,
        ]
        for name, features, parameters, state, kl, experiment, times, choose in rows
    ]
    columns = [COLUMNS[place] for place in kept]
    shown = [[row[place] for place in kept] for row in cells]
    out.print(table(title, columns, shown, right=tuple(range(1, len(columns) - 1))))
    for experiment in EXPERIMENTS:
        out.print(f"KL {experiment.key}: {experiment.what} ({experiment.source}).")
    tokens = getattr(speed_of("hedgehog", FORWARD), "tokens", 0)
    out.print(f"Faster: {FORWARD} at {tokens:,} tokens, or causal ({SPEED_SOURCE}).")


def _list(facts: list[dict[str, Any]]) -> None:
    """Print all kernels."""
    rows = []
    for fact in facts:
        quality, speed = default_quality(fact["name"]), speed_of(fact["name"])
        sizes = (fact[name] for name in ("feature_size", "extra_parameters_bert_base", "state_bytes_bert_base"))
        closeness = (None, None) if quality is None else (quality.kl, quality.experiment.key)
        times = None if speed is None else speed.times
        rows.append([fact["name"], *sizes, *closeness, times, fact["choose"] or fact["summary"]])
    _print(f"{len(rows)} kernels (sizes for BERT-base: 12 layers, 12 heads, head size 64)", rows)


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.2f}"


def _advise(model: str, *, as_json: bool) -> None:
    """Print which kernels suit a model."""
    from linearize.jobs.choose import advise

    advice = advise(model)
    if as_json:
        print_json(asdict(advice))
        return
    names = ("kernel", "features", "parameters", "state", "kl", "experiment", "times", "choose")
    rows = [[getattr(one, name) for name in names] for one in advice.candidates if not one.why_not]
    sizes = ", ".join(map(str, advice.head_dims))
    longest = "any number of" if advice.longest is None else f"{advice.longest:,}"
    sees = "causal" if advice.causal else "both ways"
    _print(f"{model}: {advice.attentions} attentions, {sees}, heads of size {sizes}, takes {longest} tokens", rows)
    out = console()
    for one in advice.candidates:
        if one.why_not:
            out.print(f"Not {one.kernel}: {one.why_not}")
    for line in [*advice.notes, *(f"{what.capitalize()}: {kernel}" for what, kernel in advice.picks.items())]:
        out.print(line)
    out.print(f"Next: {advice.command}", soft_wrap=True)


def _explain(facts: dict[str, Any]) -> None:
    """Print everything about one kernel."""
    size = (
        f"{facts['feature_size'] or 'no'} features, {facts['parameters_per_head']} parameters per head and layer "
        f"({facts['extra_parameters_bert_base']:,} for BERT-base); state of BERT-base: "
        f"{_mebibytes(facts['state_bytes_bert_base'])} MiB"
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
        noisy = ", on a noisy machine" if one["noisy"] else ""
        lines.append(("speed", f"{one['what']} at {one['tokens']:,} tokens: {one['times']:g} times faster{noisy}"))
    out = console()
    out.print(f"{facts['name']}: {facts['summary']}")
    for label, text in lines:
        out.print(f"  {label:<11}{text}")
    rows = [[a["name"], a["default"], _range(a), a["help"]] for a in facts["arguments"]]
    if rows:
        out.print(table("arguments (--kernel-arg NAME=VALUE)", ["name", "default", "values", "what"], rows))
    if facts["learnable"]:
        out.print(table("stage one, unless asked otherwise", ["option", "value"], list(facts["stage_one"].items())))


def _range(argument: dict[str, Any]) -> str:
    if "choices" in argument:
        return " | ".join(map(str, argument["choices"]))
    if "low" in argument or "high" in argument:
        step = f", multiples of {argument['multiple_of']}" if "multiple_of" in argument else ""
        return f"{argument.get('low', '')} .. {argument.get('high', '')}{step}"
    return "true | false" if isinstance(argument["default"], bool) else ""
