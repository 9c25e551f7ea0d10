"""A recipe to start from is one that runs; errors of recipes speak of YAML, not of Python."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from support.command_lines import run

import linearize
from linearize.core.errors import ConfigError, LinearizeError
from linearize.core.options import convert
from linearize.core.registry import kernel_info, make_config
from linearize.jobs.recipes.recipe import cells, load_recipe
from linearize.jobs.recipes.schema import FLOWS, Recipe

DOCUMENT = (Path(linearize.__file__).parent.parent / "docs" / "recipes.md").read_text(encoding="utf-8")


def test_the_template_is_right_with_all_its_comments(tmp_path, capsys):
    code, text, _ = run(capsys, "recipes", "template")
    assert code == 0
    recipe = load_recipe("template")
    assert len(cells(recipe)) == 3 * 1 * 3 and recipe.flow == "finetuned"
    # What is commented out is right as well.
    lines = [re.sub(r"^(\s*)# (data|paper|figures|mine):", r"\1\2:", line) for line in text.splitlines()]
    (tmp_path / "all.yaml").write_text("\n".join(lines))
    whole = load_recipe(str(tmp_path / "all.yaml"))
    assert whole.paper.title == "Hedgehog" and whole.figures["softmax"]["cola"] == 58.8 and "mine" in whole.tasks


def test_the_document_has_all_keys_and_flows():
    for field in dataclasses.fields(Recipe):
        assert f"`{field.name}`" in DOCUMENT, field.name
    assert all(f"`{flow}`" in DOCUMENT for flow in FLOWS)


@pytest.mark.parametrize(
    ("hint", "text", "words"),
    [
        (int, "2024-01-01", "got '2024-01-01' (put it in quotes if it is meant as text), expected a whole number"),
        (int, "true", "got true, expected a whole number"),
        (bool, "3", "got 3, expected true or false"),
        (str, "no", "got false, expected text"),
        (tuple[str, ...], "a", "got 'a', expected a list"),
        (int | str | None, "[1]", "got a list, expected a whole number or text"),
        (dict[str, int], "x", "got 'x', expected keys with values"),
        (float, "~", "got nothing, expected a number"),
        (tuple[int, ...] | bool, "x", "got 'x', expected a list of whole numbers or true or false"),
    ],
)
def test_errors_speak_of_yaml(hint, text, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        convert(hint, yaml.safe_load(text), "here")
    assert not re.search(r"\bNone\b|\bTrue\b|\bFalse\b|datetime|class|typing|\bint\b|\bstr\b", str(caught.value))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"frequencies": "many"}, "flexformer_n, frequencies: got 'many', expected a whole number from"),
        ({"tied": 3}, "expected true or false"),
        ({"floor": "x"}, "expected a number"),
        ({"form": 3}, "expected one of"),
    ],
)
def test_errors_of_kernel_arguments_too(arguments, words):
    with pytest.raises(LinearizeError, match=words):
        make_config(kernel_info("flexformer_n"), arguments)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kernels: 3\n- softmax\n", "line 2, column 1: expected <block end>, but found"),
        ("summary: [a\n", "line 2, column 1: expected ',' or ']', but got the end"),
    ],
)
def test_what_is_no_yaml_says_where(text, words, tmp_path):
    """It spoke of "<unicode string>", and showed the line with an arrow."""
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"recipe mine cannot be read ({words}")) as caught:
        load_recipe(str(tmp_path / "mine.yaml"))
    assert "unicode" not in str(caught.value)
