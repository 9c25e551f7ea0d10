"""The command line: one thin file per verb. `linearize.cli:main` is the console script."""

from __future__ import annotations

from linearize.cli.main import main

__all__ = ["main"]
