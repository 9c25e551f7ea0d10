"""Run a recipe: every cell of a published table, or of a demonstration."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from linearize.core.events import Callback, Event
    from linearize.jobs.recipes.schema import Recipe

EPILOG = """examples:
  linearize run minilm-glue data=./glue kernels=[softmax,hedgehog] --output runs/minilm
  linearize run associative-recall --dry-run
  linearize run minilm-glue data=./glue --output runs/minilm --resume
  linearize run minilm-glue data=./glue --output runs/minilm --resume --only '*-stsb-*'
  linearize run my-recipe.yaml finetune.epochs=1 tasks=[cola]

Finished stages stay: continue an interrupted run with --resume, which may also add kernels, tasks or seeds. More than
one process may fill a folder, each with --resume and --only, as long as no two share a task.
The table: linearize results FOLDER."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="name of a recipe (see `linearize recipes`) or a YAML file")
    add("changes", nargs="*", metavar="key=value", help="changes to it; keys with dots, values as in YAML")
    add("--output", metavar="DIR", help="folder of the run (runs/<recipe>)")
    add("--dry-run", action="store_true", help="check it, print it and do nothing")
    add("--resume", action="store_true", help="continue an interrupted run, or add kernels, tasks or seeds to one")
    add("--only", action="append", default=[], metavar="PATTERN", help="these cells only, as *-mrpc-*; may be repeated")
    add("--json", action="store_true", help="print the results (or the checked recipe) as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Run the recipe, or show what would be run."""
    from pathlib import Path

    from linearize.cli._output import console, print_json
    from linearize.cli.results import results_table
    from linearize.jobs.recipes.recipe import load_recipe, plain
    from linearize.jobs.recipes.results import make_table
    from linearize.jobs.recipes.run import check_data, run_recipe

    recipe = load_recipe(args.recipe, args.changes)
    name = Path(args.recipe).stem
    if args.dry_run:
        check_data(recipe)
        print_json(plain(recipe)) if args.json else _show(recipe, name)
        return 0
    out = console(to_stderr=args.json)
    folder = args.output or f"runs/{name}"
    try:
        rows = run_recipe(recipe, folder, resume=args.resume, only=args.only, on_event=_show_events(out))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"finished stages are in {folder}; continue with --resume") from None
    out.print(results_table(make_table(recipe, rows, name)))
    out.print(f"Results: {folder}/results.jsonl", markup=False)
    if args.json:
        print_json(rows)
    return 0


def _show(recipe: Recipe, name: str) -> None:
    """Print a checked recipe and the cells of its table."""
    import yaml

    from linearize.cli._output import console
    from linearize.jobs.recipes.recipe import cells, plain

    table = cells(recipe)
    print(yaml.safe_dump(plain(recipe), sort_keys=False, allow_unicode=True, width=110), end="")
    out = console()
    out.print(f"\n{name}: {len(table)} cells, flow {recipe.flow}. {recipe.needs}", markup=False)
    for cell in table:
        data = cell.job.data or cell.job.column.make or cell.job.task.dataset or "no data set; name one"
        out.print(f"  {cell.key}: {', '.join(cell.job.task.score)} on {data}", markup=False, soft_wrap=True)
    for line in recipe.differs:
        out.print(f"Differs from the paper: {line}", markup=False)


def _show_events(out: Console) -> Callback:
    from linearize.cli._output import StepProgress
    from linearize.cli.finetune import log_line
    from linearize.jobs.events import DataOpened, Logged, StepDone
    from linearize.jobs.recipes.run import CellDone, CellStarted

    def on_event(event: Event) -> None:
        match event:
            case CellStarted(number, count, key):
                out.print(f"[{number}/{count}] {key}", markup=False)
            case DataOpened(description):
                out.print(f"  data: {description}", markup=False, soft_wrap=True)
            case Logged(entry):
                out.print(f"  {log_line(entry)}", markup=False, soft_wrap=True)
            case StepDone(report) if report.held_out is not None:
                stage = StepProgress.stage(report)
                out.print(f"  {stage} {report.step}/{report.steps}: held out {report.held_out:.4f}", markup=False)
            case CellDone(row):
                share = "" if row["recovered"] is None else f", {row['recovered']:.1f} % of softmax above chance"
                if row["recovered"] is None and row["original"] is not None:
                    share = ", softmax is not above chance"
                out.print(f"  {row['cell']}: score {row['score']:.4f}{share}", markup=False)

    return on_event
