"""List the kernels, or explain one: formula, arguments, source."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

EPILOG = """examples:
  linearize kernels
  linearize kernels hedgehog
  linearize kernels --json"""

BERT_BASE = {"layers": 12, "heads": 12, "head_dim": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="kernel to explain")
    parser.add_argument("--json", action="store_true", help="print JSON")


def describe(info: Any) -> dict[str, Any]:
    """Return a kernel's facts as plain data, with sizes for BERT-base's heads and default arguments."""
    from linearize.attention.factory import count_parameters
    from linearize.attention.shape import HeadShape

    config, size = info.config(), BERT_BASE["head_dim"]
    shape = HeadShape(BERT_BASE["heads"], BERT_BASE["heads"], size, size, False)
    arguments = [
        {
            "name": f.name,
            "default": f.default,
            "help": f.metadata.get("help", ""),
            **{key: f.metadata[key] for key in ("low", "high", "choices") if f.metadata.get(key) is not None},
        }
        for f in dataclasses.fields(info.config)
    ]
    flags = ("learnable", "positive", "normalized", "random", "positional", "causal", "bidirectional", "streamable")
    return {
        "name": info.name,
        "summary": info.summary,
        "formula": info.formula,
        "source": info.source,
        "url": info.url,
        "feature_size": None if info.feature_dim is None else info.feature_dim(config, size),
        "extra_parameters_bert_base": count_parameters(info.name, {}, shape, BERT_BASE["layers"]),
        "parameters_per_head": info.parameters_formula,
        **{flag: getattr(info, flag) for flag in flags},
        "positive": info.is_positive(config),
        "arguments": arguments,
        "stage_one": dataclasses.asdict(info.training(config)),
    }


def run(args: argparse.Namespace) -> int:
    """Print the table or one kernel."""
    from linearize.cli._output import console, print_json, table
    from linearize.registry import kernel_info, kernel_infos

    infos = [kernel_info(args.name)] if args.name else kernel_infos()
    facts = [describe(info) for info in infos]
    if args.json:
        print_json(facts[0] if args.name else facts)
    elif args.name:
        _explain(facts[0])
    else:
        columns = ["kernel", "learns", "features", "parameters", "positive", "causal", "source"]
        rows = [
            [
                f["name"],
                _mark(f["learnable"]),
                f["feature_size"] or "-",
                f"{f['extra_parameters_bert_base']:,}",
                _mark(f["positive"]),
                _mark(f["causal"]),
                f["source"],
            ]
            for f in facts
        ]
        title = f"{len(rows)} kernels (features and extra parameters for BERT-base: 12 layers, 12 heads, head size 64)"
        console().print(table(title, columns, rows, right=(2, 3)))
    return 0


def _mark(flag: bool) -> str:
    return "yes" if flag else "no"


def _explain(facts: dict[str, Any]) -> None:
    from linearize.cli._output import console, table

    out = console()
    for label, key in (("", "summary"), ("formula", "formula"), ("source", "source"), ("paper", "url")):
        out.print(f"{facts['name']}: {facts[key]}" if not label else f"  {label:<10}{facts[key]}", markup=False)
    flags = ("learnable", "positive", "normalized", "random", "positional", "causal", "bidirectional", "streamable")
    out.print(f"  {'is':<10}{', '.join(flag for flag in flags if facts[flag])}", markup=False)
    out.print(
        f"  {'size':<10}{facts['feature_size'] or 'no'} features, {facts['parameters_per_head']} parameters per "
        f"head and layer ({facts['extra_parameters_bert_base']:,} for BERT-base)",
        markup=False,
    )
    rows = [[a["name"], a["default"], _range(a), a["help"]] for a in facts["arguments"]]
    if rows:
        out.print(table("arguments (--kernel-arg NAME=VALUE)", ["name", "default", "values", "what"], rows))
    rows = [[name, value] for name, value in facts["stage_one"].items()]
    out.print(table("stage one, unless asked otherwise", ["option", "value"], rows))


def _range(argument: dict[str, Any]) -> str:
    if "choices" in argument:
        return " | ".join(map(str, argument["choices"]))
    if "low" in argument or "high" in argument:
        return f"{argument.get('low', '')} .. {argument.get('high', '')}"
    return "true | false" if isinstance(argument["default"], bool) else ""
