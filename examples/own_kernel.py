"""For researchers with their own kernel: define it, and compare it with others in a table over tasks and seeds.

    python examples/own_kernel.py bert-base-uncased ./glue --tasks cola,stsb --seeds 0,1,2
    python examples/own_kernel.py bert-base-uncased ./glue --tasks cola --seeds 0 distil.steps=500 finetune.epochs=3
    python examples/own_kernel.py bert-base-uncased ./glue --tasks cola,stsb --seeds 0,1,2 --resume

The data folder has one folder per task. The table is the recipe `minilm-glue` with other rows, columns and model;
KEY=VALUE changes more of it, as in `linearize run`. It is printed as Markdown, with a note on the keys that differ from
the recipe. An interrupted run continues with --resume.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import linearize
from linearize.core.events import Event
from linearize.core.registry import KernelInfo, StageOne, option
from linearize.jobs.recipes.recipe import load_recipe
from linearize.jobs.recipes.results import tables, to_markdown
from linearize.jobs.recipes.run import CellDone, CellStarted, run_recipe
from linearize.kernels.base import FeatureMap, Features, draw_normal, project


@dataclass(frozen=True)
class SquaredReluConfig:
    """Arguments of `squared_relu`."""

    features: int = option(64, "feature size F", low=1, high=65536)


class SquaredRelu(FeatureMap):
    """phi(x) = relu(W x)^2 with W [F, D] per head: [B, H, T, D] -> [B, H, T, F], never negative."""

    def __init__(self, config: SquaredReluConfig, heads: int, head_dim: int) -> None:
        super().__init__(config, heads, head_dim)
        self.weight = self.add_parameter(config.features, head_dim)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw W."""
        draw_normal(self.weight, generator, self.head_dim**-0.5)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Apply the map: [B, H, T, D] -> [B, H, T, F]."""
        return Features(project(x, self.weight).relu().square())


def register() -> None:
    """Register the kernel: from now on every function and verb in this process accepts its name."""
    linearize.register_kernel(
        KernelInfo(
            name="squared_relu",
            summary="learned linear map with a squared ReLU",
            choose="as an example",
            formula="phi(x) = relu(W x)^2",
            source="examples/own_kernel.py",
            url="",
            config=SquaredReluConfig,
            build=SquaredRelu,
            feature_dim=lambda config, d: config.features,
            parameters=lambda config, d: config.features * d,
            parameters_formula="F d",
            learnable=True,
            positive=True,
            stage_one=StageOne(learning_rate=1e-2),
        )
    )


def main(argv: Sequence[str] | None = None) -> str:
    """Run the example and return the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", help="folder with one folder per task")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--tasks", default="cola", metavar="A,B,...")
    parser.add_argument("--seeds", default="0", metavar="A,B,...")
    parser.add_argument("--kernels", default="softmax,elu,hedgehog,squared_relu", metavar="A,B,...")
    parser.add_argument("--output", default="runs/own-kernel")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_intermixed_args(argv)

    register()
    changes = [
        f"model={{name: {args.model!r}}}",
        f"data={args.data}",
        f"tasks=[{args.tasks}]",
        f"seeds=[{args.seeds}]",
        f"kernels=[{args.kernels}]",
    ]
    recipe = load_recipe("minilm-glue", [*changes, *args.changes])
    run_recipe(recipe, args.output, resume=args.resume, on_event=say)
    table = to_markdown(tables(args.output))
    print(table)
    return table


def say(event: Event) -> None:
    """Print each cell of the table when it starts, and its score at the end."""
    if isinstance(event, CellStarted):
        print(f"{event.number} of {event.count}: {event.key}", flush=True)
    elif isinstance(event, CellDone):
        print(f"    {event.row['score']}", flush=True)


if __name__ == "__main__":
    main()
