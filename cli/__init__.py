"""The command line: `verbs` declares the verbs, other modules run them. `linearize.cli:main` is the console script."""

from __future__ import annotations

from linearize.cli.main import main

__all__ = ["main"]
