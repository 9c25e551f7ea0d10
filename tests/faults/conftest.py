"""Tiny models and data, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_lines import make_models

from linearize.cli import main


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """Folder of softmax and converted models, a data set, a config and a recipe."""
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def cli(capsys):
    """Run a command line in this process: exit code, stdout, stderr."""

    def run(words):
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
