"""Run `recipes`, `run` and `results`: tables of kernels by tasks."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import yaml
from rich.console import Group

from linearize.cli._output import Screen, print_json, table
from linearize.cli._progress import at_work
from linearize.core.errors import printable
from linearize.core.events import Event
from linearize.core.parsing import read_text
from linearize.jobs.recipes.recipe import cells, load_recipe, plain, recipe_file, recipe_names
from linearize.jobs.recipes.results import Table, lines_of, make_table, notes_of, tables, to_markdown


def recipes(args: argparse.Namespace, out: Screen) -> object:
    """Print the list or one recipe."""
    if args.name:
        recipe = load_recipe(args.name)
        if not args.json:
            print(printable(read_text(recipe_file(args.name))), end="")
        return plain(recipe)
    facts = []
    for name in recipe_names():
        recipe = load_recipe(name)
        paper = "" if recipe.paper is None else f"{recipe.paper.title}, {recipe.paper.table}"
        sizes = {"cells": len(cells(recipe)), "needs": recipe.needs}
        facts.append({"name": name, "summary": recipe.summary, "paper": paper, **sizes})
    if not args.json:
        columns = ["recipe", "what", "paper", "cells", "needs"]
        rows = [list(fact.values()) for fact in facts]
        out.print(table(f"{len(rows)} recipes (linearize run NAME)", columns, rows, right=(3,)))
    return facts


def run(args: argparse.Namespace, out: Screen) -> object:
    """Run the recipe, or show its cells."""
    from linearize.jobs.recipes.run import CellDone, CellStarted, check_data, chosen_cells, run_recipe

    recipe = load_recipe(args.recipe, args.changes)
    name = Path(args.recipe).stem
    if args.dry_run:
        check_data(recipe)
        planned = chosen_cells(cells(recipe), args.only)
        if not args.json:
            print(yaml.safe_dump(plain(recipe), sort_keys=False, allow_unicode=True, width=110), end="")
            out.print(f"\n{name}: {len(planned)} cells, flow {recipe.flow}. {recipe.needs}")
            for cell in planned:
                data = cell.job.data or cell.job.column.make or cell.job.task.dataset or "no data set; name one"
                out.print(f"  {cell.key}: {', '.join(cell.job.task.score)} on {data}", soft_wrap=True)
            for line in recipe.differs:
                out.print(f"Differs from the paper: {line}")
        return plain(recipe)
    folder = args.output or f"runs/{name}"

    def announce(event: Event) -> None:
        match event:
            case CellStarted(number, count, key):
                out.print(f"[{number}/{count}] {key}")
            case CellDone(row):
                work.progress.stop()
                share = "" if row["recovered"] is None else f", {row['recovered']:.1f} % of softmax above chance"
                if row["recovered"] is None and row["original"] is not None:
                    share = ", softmax is not above chance"
                out.print(f"{row['cell']}: score {row['score']:.4f}{share}")

    def kept() -> str:
        return f"finished stages are in {folder}; continue with --resume" if Path(folder).exists() else ""

    with at_work(out, "opening the run", kept, announce) as work:
        rows = run_recipe(recipe, folder, resume=args.resume, only=args.only, on_event=work)
    out.print(results_table(make_table(recipe, name, rows)))
    out.print(f"Results: {folder}/results.jsonl")
    return rows


def results(args: argparse.Namespace, out: Screen) -> None:
    """Print the tables."""
    made = tables(args.folder)
    kind = "json" if args.json else args.format
    if kind == "json":
        print_json([asdict(table) for table in made])
        return
    if kind == "md":
        print(to_markdown(made), end="")
        return
    for each in made:
        out.print(results_table(each))
        for line in notes_of(each):
            out.print(line)


def results_table(results: Table) -> Group:
    """Return a run's table for the console."""
    right = tuple(range(1, len(results.columns) + 1))
    return table(results.title, ["", *results.columns], lines_of(results), right=right)
