"""List the kernels with what was measured of them, explain one, or advise on the kernel for a model."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from linearize.registry import KernelInfo

EPILOG = """examples:
  linearize kernels
  linearize kernels hedgehog
  linearize kernels --for roberta-base              # which of them suit this model, and what they take there
  linearize kernels --json

KL: how far from softmax, nats per query, on MiniLM: smaller is closer, and only figures of one letter compare. Faster:
against SDPA on a CPU with the native op. State: what decoding keeps per sequence instead of a cache that grows."""

LIMITS = ("low", "high", "multiple_of", "choices")
"""What is known of an argument's values, by its name in `linearize.registry.option`."""
BERT_BASE = {"layers": 12, "heads": 12, "head_dim": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="kernel to explain")
    parser.add_argument("--for", dest="model", metavar="MODEL", help="advise for a model: Hub name or folder")
    parser.add_argument("--json", action="store_true", help="print JSON")


def describe(info: KernelInfo) -> dict[str, Any]:
    """Return a kernel's facts as plain data, with sizes for BERT-base's heads and default arguments."""
    from linearize.attention.factory import count_parameters, state_bytes
    from linearize.attention.shape import HeadShape
    from linearize.bench.measured import SPEED, SPEED_SOURCE, quality_of

    config, size = info.config(), BERT_BASE["head_dim"]
    shape = HeadShape(BERT_BASE["heads"], BERT_BASE["heads"], size, size, False)
    arguments = [
        {
            "name": f.name,
            "default": f.default,
            "help": f.metadata.get("help", ""),
            **{key: f.metadata[key] for key in LIMITS if f.metadata.get(key) is not None},
        }
        for f in dataclasses.fields(info.config)
    ]
    flags = ("learnable", "positive", "normalized", "random", "positional", "causal", "bidirectional", "streamable")
    features = None if info.feature_dim is None else info.feature_dim(config, size)
    return {
        "name": info.name,
        "summary": info.summary,
        "formula": info.formula,
        "source": info.source,
        "url": info.url,
        "choose": info.choose,
        "quality": [dataclasses.asdict(one) for one in quality_of(info.name)],
        "speed": [dataclasses.asdict(one) for one in SPEED if one.kernel == info.name],
        "speed_source": SPEED_SOURCE,
        "feature_size": features,
        "state_bytes_bert_base": state_bytes(info, config, [shape] * BERT_BASE["layers"]),
        "extra_parameters_bert_base": count_parameters(info.name, {}, shape, BERT_BASE["layers"]),
        "parameters_per_head": info.parameters_formula,
        **{flag: getattr(info, flag) for flag in flags},
        "positive": info.is_positive(config),
        "arguments": arguments,
        "stage_one": dataclasses.asdict(info.training(config)),
    }


def run(args: argparse.Namespace) -> int:
    """Print the table, one kernel, or the advice."""
    from linearize.cli._output import print_json
    from linearize.registry import kernel_info, kernel_infos

    if args.model:
        return _advise(args)
    infos = [kernel_info(args.name)] if args.name else kernel_infos()
    facts = [describe(info) for info in infos]
    if args.json:
        print_json(facts[0] if args.name else facts)
    elif args.name:
        _explain(facts[0])
    else:
        _list(facts)
    return 0


COLUMNS = ["kernel", "features", "parameters", "state, MiB", "KL", "faster", "choose it"]
NARROW = (0, 4, 5, 6)
"""Columns on a terminal that has no room for all of them; `kernels NAME` has the others."""


def _print(out: Console, title: str, rows: list[list[Any]]) -> None:
    from linearize.cli._output import ROOMY, table

    kept = range(len(COLUMNS)) if out.width >= ROOMY else NARROW
    shown = [[str(row[place]) for place in kept] for row in rows]
    names = [COLUMNS[place] for place in kept]
    out.print(table(title, names, shown, right=tuple(range(1, len(names) - 1))))


def _list(facts: list[dict[str, Any]]) -> None:
    """Print all kernels and where their figures are from."""
    from linearize.bench.measured import default_quality, speed_of
    from linearize.cli._output import console

    rows = []
    for one in facts:
        quality, speed = default_quality(one["name"]), speed_of(one["name"])
        rows.append(
            [
                one["name"],
                one["feature_size"] or "-",
                f"{one['extra_parameters_bert_base']:,}",
                _mebibytes(one["state_bytes_bert_base"]),
                "-" if quality is None else _closeness(quality.kl, quality.experiment.key),
                _times(None if speed is None else speed.times),
                one["choose"] or one["summary"],
            ]
        )
    out = console()
    title = f"{len(rows)} kernels (sizes for BERT-base: 12 layers, 12 heads, head size 64)"
    _print(out, title, rows)
    _sources(out)


def _sources(out: Console) -> None:
    from linearize.bench.measured import EXPERIMENTS, FORWARD, SPEED_SOURCE, speed_of

    for one in EXPERIMENTS:
        out.print(f"KL {one.key}: {one.what} ({one.source}).", markup=False)
    tokens = getattr(speed_of("hedgehog", FORWARD), "tokens", 0)
    out.print(f"Faster: {FORWARD} at {tokens:,} tokens, or causal ({SPEED_SOURCE}).", markup=False)


def _closeness(kl: float | None, experiment: str | None) -> str:
    return "-" if kl is None else f"{kl:.3f} {experiment}"


def _times(times: float | None) -> str:
    return "-" if times is None else f"{times:.1f} x"


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.2f}"


def _advise(args: argparse.Namespace) -> int:
    """Print which kernels suit a model."""
    from linearize.cli._output import console, print_json
    from linearize.errors import ConfigError
    from linearize.jobs.choose import advise

    if args.name:
        raise ConfigError(f"kernels: got the kernel {args.name!r} and --for, expected one of them; drop one")
    found = advise(args.model)
    if args.json:
        print_json(found.to_dict())
        return 0
    fits = [one for one in found.candidates if not one.why_not]
    rows = [
        [
            one.kernel,
            one.features or "-",
            f"{one.parameters:,}",
            _mebibytes(one.state),
            _closeness(one.kl, one.experiment),
            _times(one.times),
            one.choose,
        ]
        for one in fits
    ]
    sizes = ", ".join(map(str, found.head_dims))
    longest = "any number of" if found.longest is None else f"{found.longest:,}"
    out = console()
    title = (
        f"{found.model}: {found.attentions} attentions, {'causal' if found.causal else 'both ways'}, heads of size "
        f"{sizes}, takes {longest} tokens"
    )
    _print(out, title, rows)
    for one in found.candidates:
        if one.why_not:
            out.print(f"Not {one.kernel}: {one.why_not}", markup=False)
    _sources(out)
    for text in found.notes:
        out.print(text, markup=False)
    for what, kernel in found.picks.items():
        out.print(f"{what.capitalize()}: {kernel}", markup=False)
    out.print(f"Next: {found.command}", markup=False, soft_wrap=True)
    return 0


def _explain(facts: dict[str, Any]) -> None:
    from linearize.cli._output import console, table

    out = console()
    for label, key in (
        ("", "summary"),
        ("choose it", "choose"),
        ("formula", "formula"),
        ("source", "source"),
        ("paper", "url"),
    ):
        out.print(f"{facts['name']}: {facts[key]}" if not label else f"  {label:<11}{facts[key]}", markup=False)
    flags = ("learnable", "positive", "normalized", "random", "positional", "causal", "bidirectional", "streamable")
    out.print(f"  {'is':<11}{', '.join(flag for flag in flags if facts[flag])}", markup=False)
    out.print(
        f"  {'size':<11}{facts['feature_size'] or 'no'} features, {facts['parameters_per_head']} parameters per "
        f"head and layer ({facts['extra_parameters_bert_base']:,} for BERT-base); state of BERT-base: "
        f"{_mebibytes(facts['state_bytes_bert_base'])} MiB",
        markup=False,
    )
    for one in facts["quality"]:
        args = ", ".join(f"{name}={value}" for name, value in one["arguments"].items())
        score = "" if one["score"] is None else f"; {one['score']:.1f} % of softmax's score after the alignment"
        where = f"{one['experiment']['what']}{score} ({one['experiment']['source']})"
        out.print(f"  {'quality':<11}{args and f'{args}: '}KL {one['kl']:.3f}, {where}", markup=False)
    for one in facts["speed"]:
        noisy = ", on a noisy machine" if one["noisy"] else ""
        what = f"{one['what']} at {one['tokens']:,} tokens: {one['times']:g} times faster{noisy}"
        out.print(f"  {'speed':<11}{what}", markup=False)
    rows = [[a["name"], a["default"], _range(a), a["help"]] for a in facts["arguments"]]
    if rows:
        out.print(table("arguments (--kernel-arg NAME=VALUE)", ["name", "default", "values", "what"], rows))
    if facts["learnable"]:
        rows = [[name, value] for name, value in facts["stage_one"].items()]
        out.print(table("stage one, unless asked otherwise", ["option", "value"], rows))


def _range(argument: dict[str, Any]) -> str:
    if "choices" in argument:
        return " | ".join(map(str, argument["choices"]))
    if "low" in argument or "high" in argument:
        step = f", multiples of {argument['multiple_of']}" if "multiple_of" in argument else ""
        return f"{argument.get('low', '')} .. {argument.get('high', '')}{step}"
    return "true | false" if isinstance(argument["default"], bool) else ""
