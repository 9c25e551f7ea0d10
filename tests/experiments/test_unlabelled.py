"""Recipes whose tasks read texts without a label in addition to their rows."""

from __future__ import annotations

import pytest

from linearize.core.errors import DataError
from linearize.jobs.events import DataOpened
from linearize.jobs.recipes.recipe import check, resolve
from linearize.jobs.recipes.run import run_recipe
from linearize.jobs.recipes.schema import StageOne
from linearize.jobs.recipes.stages import batches_of, open_job


def test_texts_without_a_label_are_found_before_a_run_begins(tiny, sets, tmp_path):
    """They lie in the folder of data; stage one and the alignment learn from them too."""
    tiny["tasks"]["cola"] = {"rows": {"extra_texts": "mrpc=0.5"}}
    tiny["finetune"] |= {"teacher": True}
    recipe = check(tiny, "tiny")
    data, _ = open_job(recipe.model, resolve(recipe)["cola"], 0)
    assert data.description.endswith("24 texts without a label (24 of mrpc)")
    # 48 rows, 9 of them held out, and 24 texts.
    assert batches_of(data, StageOne(batch_size=8, holdout=8), 0).steps_per_epoch == (39 + 24 + 7) // 8
    tiny["tasks"]["cola"]["rows"]["extra_texts"] = "mrcp"
    with pytest.raises(DataError, match="extra_texts: got 'mrcp', which does not exist in "):
        run_recipe(check(tiny, "tiny"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_texts_without_a_label_beside_the_rows(tiny, sets, tmp_path):
    """Every stage of a converted row learns from them, softmax does not."""
    tiny |= {
        "kernels": ["softmax", "hedgehog"],
        "tasks": {"cola": {"rows": {"extra_texts": "mrpc=0.5"}}},
        "figures": {},
    }
    tiny |= {"align": {"steps": 2, "batch_size": 8, "eval_every": 1, "holdout": 8}}
    tiny["finetune"] |= {"teacher": True, "batch_size": 8, "eval_every": 20}
    seen = []
    rows = run_recipe(check(tiny, "tiny"), tmp_path / "run", on_event=seen.append)
    said = [event.description for event in seen if isinstance(event, DataOpened)]
    assert said and all("24 texts without a label (24 of mrpc)" in line for line in said)
    # 48 rows, 9 of them held out; two passes of 16 rows, one of 8 with 24 more texts.
    assert [row["finetune"]["steps"] for row in rows] == [2 * 3, (39 + 24 + 7) // 8]
    assert [row["finetune"]["selection"]["rows"] for row in rows] == [9, 9]
