from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from linearize.core.errors import ConfigError
from linearize.data import DataConfig, parse_mixture


def test_every_field_has_help() -> None:
    for field in dataclasses.fields(DataConfig):
        assert not field.metadata["help"].endswith(".") and len(field.metadata["help"]) > 20


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("imdb", "imdb"),
        ("Salesforce/wikitext:wikitext-2-raw-v1", "Salesforce/wikitext:wikitext-2-raw-v1"),
        ("a.jsonl=0.7,b.txt=0.3", (("a.jsonl", 0.7), ("b.txt", 0.3))),
        ("a.jsonl=2, o/n:c=1", (("a.jsonl", 2.0), ("o/n:c", 1.0))),
        ("a.jsonl,b.txt", (("a.jsonl", 1.0), ("b.txt", 1.0))),
    ],
)
def test_mixtures_are_parsed(text: str, parsed: object) -> None:
    assert parse_mixture(text) == parsed
    assert DataConfig(dataset=text).dataset == parsed


def test_a_path_that_exists_is_no_mixture(tmp_path: Path) -> None:
    path = tmp_path / "a=1,b.txt"
    path.write_text("x")
    assert parse_mixture(str(path)) == str(path)


@pytest.mark.parametrize("text", ["", "  ", "a=0.7,b", "a=x", "a=-1", "a=0", "a=inf", "a=nan", "=0.5", ",", "a,,b"])
def test_bad_mixtures_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"data: (got|dataset)"):
        DataConfig(dataset=text)


def test_what_yaml_has_becomes_pairs() -> None:
    expected = (("a", 0.5), ("b", 1.0))
    assert DataConfig(dataset=[["a", 0.5], ["b", 1]]).dataset == expected  # type: ignore[arg-type]
    assert DataConfig(dataset={"a": 0.5, "b": 1}).dataset == expected  # type: ignore[arg-type]
    assert DataConfig(dataset="a").sources == (("a", 1.0),)
    assert DataConfig().sources == ()
    hash(DataConfig(dataset=[["a", 0.5]]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_length", 0),
        ("batch_size", 0),
        ("batch_size", 2.0),
        ("batch_size", True),
        ("seed", -1),
        ("holdout", -1),
        ("packing", "yes"),
        ("split", ""),
        ("text_column", 3),
        ("text_column", "a,b,c"),
        ("text_column", "a,"),
        ("dataset", 3),
        ("dataset", ()),
        ("dataset", (("a", 1), "b")),
        ("dataset", ((3, 1),)),
    ],
)
def test_bad_values_are_refused_with_one_line(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        DataConfig(**{name: value})  # type: ignore[arg-type]
    assert name in str(caught.value) and "expected" in str(caught.value) and "\n" not in str(caught.value)


def test_packing_excludes_pairs() -> None:
    with pytest.raises(ConfigError, match="packing together with text_pair_column"):
        DataConfig(packing=True, text_pair_column="x")


def test_two_columns_make_a_pair() -> None:
    config = DataConfig(text_column="a, b")
    assert (config.text_column, config.text_pair_column) == ("a", "b")
    with pytest.raises(ConfigError, match="expected one name, or two"):
        DataConfig(text_column="a,b", text_pair_column="c")


def test_importing_is_light() -> None:
    code = (
        "import sys, linearize.data; "
        "linearize.data.DataConfig(dataset='a=1,b=2'); "
        "print([m for m in ('torch', 'datasets', 'transformers', 'numpy', 'sklearn', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
