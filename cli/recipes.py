"""List the recipes, print one, or write one to start from."""

from __future__ import annotations

import argparse

from linearize.core.errors import ConfigError, printable

EPILOG = """examples:
  linearize recipes
  linearize recipes minilm-glue
  linearize recipes --new mine.yaml                 # every key explained; then linearize run mine.yaml --dry-run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="recipe to print")
    parser.add_argument("--new", metavar="FILE.yaml", help="write a recipe to start from, every key explained")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the list or one recipe, or write a new one."""
    from linearize.cli._output import console, print_json, table
    from linearize.jobs.recipes.recipe import cells, load_recipe, new_recipe, plain, recipe_names, recipe_text

    if args.new:
        if args.name:
            raise ConfigError(f"recipes: got {args.name!r} and --new, expected one of them; drop one")
        path = new_recipe(args.new)
        if args.json:
            print_json({"file": str(path)})
        else:
            console().print(f"Wrote {path}. Next: linearize run {path} --dry-run", markup=False, soft_wrap=True)
        return 0
    if args.name:
        recipe = load_recipe(args.name)
        print_json(plain(recipe)) if args.json else print(printable(recipe_text(args.name)), end="")
        return 0
    facts = []
    for name in recipe_names():
        recipe = load_recipe(name)
        paper = "" if recipe.paper is None else f"{recipe.paper.title}, {recipe.paper.table}"
        facts.append(
            {
                "name": name,
                "summary": recipe.summary,
                "paper": paper,
                "cells": len(cells(recipe)),
                "needs": recipe.needs,
            }
        )
    if args.json:
        print_json(facts)
        return 0
    rows = [list(fact.values()) for fact in facts]
    title = f"{len(rows)} recipes (linearize run NAME)"
    console().print(table(title, ["recipe", "what", "paper", "cells", "needs"], rows, right=(3,)))
    return 0
