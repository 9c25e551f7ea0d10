"""`--explain-backend`: which backend carries out the calls of each layer, and why those before it declined."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from linearize.attention.backends.choose import Explanation
    from linearize.attention.mixer import Mixer
    from linearize.modeling.plan import Plan


def add_explain(parser: argparse._ActionsContainer) -> None:
    """Declare the option."""
    parser.add_argument(
        "--explain-backend",
        action="store_true",
        help="print which backend computes each layer's attention, and why those tried before it declined",
    )


def explain_plan(out: Console, plan: Plan, tokens: int, device: str) -> None:
    """Print the backends of a plan's layers, equal layers together."""
    import torch

    from linearize.attention.factory import build_mixer
    from linearize.checkpoint.loading import check_device

    device = check_device(device)
    layers: dict[str, Mixer] = {}
    built: dict[str, Mixer] = {}
    for number, layer in enumerate(plan.layers):
        if not layer.converted:
            continue
        key = repr(layer.mixer)
        if key not in built:
            built[key] = build_mixer(*layer.mixer)
            built[key].reset_parameters(torch.Generator().manual_seed(0))
            built[key].to(device)
        layers[str(number if layer.index is None else layer.index)] = built[key]
    explain_layers(out, layers, tokens, device)


def explain_layers(
    out: Console, layers: Mapping[str, Mixer], tokens: int, device: str, dtype: torch.dtype | None = None
) -> None:
    """Print the backends of layers by name, equal ones together."""
    import torch

    from linearize.attention.backends.choose import explain

    known: dict[int, list[Explanation]] = {}
    folded: dict[tuple[Any, ...], list[str]] = {}
    for name, mixer in layers.items():
        if id(mixer) not in known:
            known[id(mixer)] = explain(mixer, tokens, device=device, dtype=dtype or torch.float32)
        folded.setdefault((mixer.info.name, *known[id(mixer)]), []).append(name)
    for (kernel, *explanations), names in folded.items():
        out.print(f"Backends of {_ranges(names)}, {kernel}:", markup=False)
        for explanation in explanations:
            out.print(f"  {explanation.call}: {explanation.backend}", markup=False)
            reasons: dict[str, list[str]] = {}
            for backend, why in explanation.declined:
                reasons.setdefault(why, []).append(backend)
            for why, backends in reasons.items():
                out.print(f"    declined, {why}: {'; '.join(backends)}", markup=False, soft_wrap=True)


def _ranges(names: list[str]) -> str:
    """Write layer numbers as ranges: layers 0-3, 5; other names as they are."""
    if not all(name.isdecimal() for name in names):
        return ", ".join(names)
    runs: list[list[int]] = []
    for number in map(int, names):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"layer{'s' if len(names) > 1 else ''} {text}"
