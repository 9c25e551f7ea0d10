"""The script that compares the search with conversions: all its parts on a tiny model."""

from __future__ import annotations

import json

import pytest
from support.checkpoints import make_original, texts
from support.scripts import script

from linearize.core.errors import ConfigError

check = script("search_check")


def test_the_ranking():
    before = {"a": [0.1, 0.2], "b": [0.2, 0.3], "c": [0.3, 0.1], "other": [0.0, 0.0]}
    found = check.ranking(before, {"a": [0.01, 0.2], "b": [0.02, 0.3], "c": [0.03, 0.4]})
    assert found["rank_correlation_by_layer"] == pytest.approx([1.0, -0.5])
    # Means before: .15, .25, .2; after: .105, .16, .215.
    assert found["rank_correlation"] == pytest.approx(0.5)
    assert check.ranking({"a": [1.0], "b": [1.0]}, {"a": [1.0], "b": [2.0]})["rank_correlation"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kernels", "hedgehog,elu"], "kernels: got elu, expected some of hedgehog,flexformer_n,"),
        (["--parts", "time,rank"], "parts: got rank, expected some of time,ranking"),
    ],
)
def test_wrong_options_are_refused_before_the_work(words, message, capsys):
    """A kernel that the search does not try was a KeyError after hours."""
    with pytest.raises(SystemExit):
        check.parse(["bert", "--dataset", "texts.jsonl", *words])
    assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"--output: got .* expected a file in an existing folder"):
        check.parse(["bert", "--dataset", "texts.jsonl", "--output", "nowhere/out.json"])


@pytest.mark.slow
@pytest.mark.usefixtures("given_costs")
def test_all_parts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_original(tmp_path / "bert")
    texts(tmp_path, 40)
    line = (
        "bert --dataset texts.jsonl --batch-size 4 --holdout 8 --distill-length 16 --search-steps 7 --distill-steps 5"
    )
    assert (
        check.main(
            [
                *line.split(),
                "--kernels",
                "hedgehog,t2r,luna",
            ]
        )
        == 0
    )
    found = json.loads((tmp_path / "search-check.json").read_text())
    assert found["search"]["steps"] == 7 and found["conversion"]["stage_one_steps"] == 5
    assert found["conversion"]["alignment_steps"] == 2 and found["conversion"]["kernel"] == "hedgehog"
    ratio = found["search"]["cpu_seconds"] / found["conversion"]["cpu_seconds"]
    assert found["search over conversion"]["cpu_seconds"] == pytest.approx(ratio)
    means = found["ranking"]["in the search, after stage one"]
    assert list(means) == ["hedgehog", "t2r", "luna"] and len(found["ranking"]["rank_correlation_by_layer"]) == 2
    assert means["t2r"][0] == pytest.approx(sum(found["search"]["output_error"]["t2r"]) / 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert", "search-check.json", "texts.jsonl"]
