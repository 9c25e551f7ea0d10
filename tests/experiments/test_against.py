"""One conversion measured on several tasks, and its rows compared with a control."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.tasks import write

from linearize.cli import main
from linearize.jobs.recipes import against as module
from linearize.jobs.recipes.against import against, as_good
from linearize.jobs.recipes.recipe import check, load_recipe, plain
from linearize.jobs.recipes.run import run_recipe
from linearize.training.stage_two.metrics import METRICS


def test_the_share_of_tasks_within_each_tolerance():
    needed = [0.0, 0.4, 3.0, 1.0]
    assert as_good(needed) == (0.25, 0.5, 0.75, 0.75)


@pytest.fixture
def proof(tiny, sets, tmp_path):
    for split, seed in (("train", 0), ("validation", 1)):
        rows = [{**json.loads(line)} for line in (sets / "mrpc" / f"{split}.jsonl").read_text().splitlines()]
        numbers = np.random.default_rng(seed).permutation(len(rows))
        write(tmp_path / "data" / "mrpc" / f"{split}.jsonl", rows)
        alike = [{**row, "label": float(n)} for row, n in zip(rows, numbers, strict=True)]
        write(tmp_path / "data" / "stsb" / f"{split}.jsonl", alike)
    for key in ("teacher", "finetune", "figures"):
        tiny.pop(key)
    window = {"name": "none", "label": "window only", "window": 2}
    return tiny | {
        "flow": "untuned",
        "sources": ["stsb"],
        "kernels": ["softmax", window, "elu"],
        "tasks": {"stsb": {"task": "similarity", "folder": "stsb"}, "duplicates": {"folder": "mrpc"}},
        "data": str(tmp_path / "data"),
        "seeds": [0, 1],
    }


def test_rows_compared_with_a_control(proof, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "RESAMPLES", 50)
    recipe = check(proof, "tiny")
    # A kernel that needs a window comes back from plain data, too.
    assert check(plain(recipe), "again") == recipe
    folder = tmp_path / "run"
    rows = {row["cell"]: row for row in run_recipe(recipe, folder)}
    assert len(rows) == 12 and rows["elu_from_stsb-duplicates-s1"]["source"] == "stsb"
    # Two tasks share one conversion.
    assert sorted(path.name for path in (folder / "distilled").iterdir()) == sorted(
        f"{name}_from_stsb-s{seed}" for name in ("window_only", "elu") for seed in (0, 1)
    )
    found = against(folder, "window only from stsb")
    for name, row in (("softmax", "softmax"), ("elu from stsb", "elu_from_stsb")):
        for task in ("stsb", "duplicates"):
            gap = found.gaps[name][task]
            pairs = [
                [rows[f"{one}-{task}-s{seed}"]["score"] for one in (row, "window_only_from_stsb")] for seed in (0, 1)
            ]
            expected = 100 * np.mean([ours - theirs for ours, theirs in pairs])
            assert gap.value == pytest.approx(expected) and gap.seeds == 2
            assert gap.interval is not None and gap.interval[0] <= gap.interval[1]
            score = "spearman" if task == "stsb" else "roc_auc"
            assert gap.metrics[score][0] == pytest.approx(expected, abs=1e-3)
    same = [gap.value >= 0 for gap in found.gaps["elu from stsb"].values()]
    assert found.as_good["elu from stsb"][0] == sum(same) / 2
    assert all((found.half[name] == 0) == (found.as_good[name][0] >= 0.5) for name in found.gaps)
    assert len(found.cells()) == 2 and "of 2 tasks; on half of them within" in found.notes()[0]
    assert main(["results", str(folder), "--against", "softmax"]) == 0
    assert "points above softmax" in capsys.readouterr().out
    assert main(["results", str(folder), "--against", "softmax", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["row"] == "softmax"
    for more, told in ((["elu"], "unknown row 'elu'"), (["softmax", "--format", "md"], "expected table or json")):
        assert main(["results", str(folder), "--against", *more]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", ["proof-minilm", "proof-minilm-long"])
def test_the_recipes_of_the_proof_have_their_controls(name):
    rows = {row.called: row for row in load_recipe(name).kernels}
    assert rows["window only"].name == "none" and rows["softmax"].name == "softmax"
    assert rows["hedgehog window"].window == rows["window only"].window


def test_the_area_under_the_roc():
    auc = METRICS["roc_auc"]
    assert auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))["roc_auc"] == 0.75
    assert auc(np.array([0.5, 0.5, 0.5]), np.array([0, 1, 1]))["roc_auc"] == 0.5
    assert np.isnan(auc(np.array([0.5]), np.array([1]))["roc_auc"])
