"""Results as tables in other formats, and what was not made as the recipe says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from support.command_lines import run

from linearize.jobs.recipes.recipe import cells, load_recipe, plain
from linearize.jobs.recipes.results import changes_of, make_table, notes_of, to_markdown
from linearize.training.stage_two.tasks import recovery

KERNELS = "kernels=[softmax,{name: hedgehog, args: {activation: exp}},{name: elu, label: e&u_1}]"
CHANGED = [KERNELS, "tasks=[cola,stsb]", "seeds=[0,1]",
           "distil.steps=10", "tasks.stsb.finetune.epochs=1", "data=somewhere", "device=cpu"]  # fmt: skip


def rows_of(recipe):
    """Made-up results: 0.50 and 0.52 with seeds 0 and 1, and one cell short."""
    made = []
    for cell in cells(recipe)[:-1]:
        score = 0.5 + 0.02 * cell.seed
        made.append({"cell": cell.key, "row": cell.row, "task": cell.job.name, "seed": cell.seed, "score": score,
                     "percent": True, "recovered": None if cell.row == "softmax" else 90.0})  # fmt: skip
    return made


@pytest.fixture(scope="module")
def recipe():
    return load_recipe("minilm-glue", CHANGED)


@pytest.fixture(scope="module")
def table(recipe):
    return make_table(recipe, "mine", rows_of(recipe))


def test_what_was_changed(recipe):
    assert changes_of(recipe) == ("minilm-glue", "kernels", "tasks", "seeds", "distil")
    assert changes_of(load_recipe("minilm-glue", ["tasks.stsb.finetune.epochs=1"])) == ("minilm-glue", "tasks")
    assert changes_of(replace(recipe, summary="a file of one's own")) == ()


@pytest.mark.parametrize("name", ["minilm-glue", "associative-recall", "luna-lra"])
def test_a_recipe_as_it_is_has_no_changes(name):
    for one in (load_recipe(name), load_recipe(name, ["data=here", "device=cpu"])):
        assert changes_of(one) == ()
    # What a run's folder holds is the resolved recipe.
    from linearize.jobs.recipes.recipe import check

    assert changes_of(check(yaml.safe_load(yaml.safe_dump(plain(load_recipe(name)))), "here")) == ()


def test_markdown(table):
    lines = to_markdown([table]).splitlines()
    assert lines[2] == "|  | cola | stsb | average |" and lines[3] == "| --- | ---: | ---: | ---: |"
    row = next(line for line in lines if line.startswith("| hedgehog"))
    assert row.startswith("| hedgehog | 51.00 ± 1.41 (90.0 %) | 51.00 ± 1.41 (90.0 %) |")
    assert all(line.replace(r"\|", "").count("|") == 5 for line in lines[2:7])
    assert any("Different from recipe minilm-glue: kernels, tasks, seeds, distil." in line for line in lines)


@pytest.mark.parametrize(("softmax", "share"), [(0.80, "80.0 %"), (0.65, None)])
def test_chance_has_a_row_and_no_ratio_stands_on_it(tmp_path, softmax, share):
    """35.00 (100.0 %) stood in tables where the majority class gives 65: now chance has a separate row."""
    recipe = load_recipe("minilm-glue", ["tasks=[cola,sst2]", "kernels=[softmax,elu]", "seeds=[0]"])
    made = []
    for cell in cells(recipe):
        score = softmax if cell.row == "softmax" else 0.77 if softmax > 0.65 else 0.35
        shared = {"chance": 0.65, "percent": True, "seed": 0, "cell": cell.key, "row": cell.row, "task": cell.job.name}
        levels = {"chance": 0.65, "interval": (softmax - 0.05, softmax + 0.05)}
        recovered = None if cell.row == "softmax" else recovery(cell.job.task, score, softmax, **levels)
        made.append(shared | {"score": score, "recovered": recovered})
    table = make_table(recipe, "mine", made)
    assert list(table.rows)[-1] == "chance" and table.rows["chance"]["average"].ours == pytest.approx(65.0)
    cell = f"77.00 ({share})" if share else "35.00"
    lines = to_markdown([table]).splitlines()
    line = next(line for line in lines if line.lstrip("| ").startswith("elu")).replace("\\", "").replace("*", "")
    assert line.count(cell) == 3 and line.count("%") == (3 if share else 0), line
    assert any(line.lstrip("| ").startswith("chance") and line.count("65.00") == 3 for line in lines)


@pytest.mark.parametrize("late", [False, True])
def test_the_share_is_known_if_softmax_was_run_after_the_kernel(late):
    """As with --only: the row of the kernel then has no score of softmax."""
    changes = ["tasks=[mrpc]", "sources=[sst2]", "kernels=[softmax,elu]", "seeds=[0,1]"]
    recipe = load_recipe("minilm-transfer", changes)
    made = []
    for cell in cells(recipe):
        score, softmax = (0.77, 0.83)[cell.seed], (0.80, 0.85)[cell.seed]
        levels = {"chance": 0.65, "interval": (softmax - 0.05, softmax + 0.05)}
        known = None if cell.row == "softmax" or late else softmax
        share = None if known is None else recovery(cell.job.task, score, softmax, **levels)
        made.append(
            {"cell": cell.key, "row": cell.row, "kernel": cell.kernel.name, "task": "mrpc", "seed": cell.seed,
             "score": softmax if cell.row == "softmax" else score, "percent": True, **levels, "original": known,
             "recovered": share}
        )  # fmt: skip
    rows = make_table(recipe, "mine", made[::-1]).rows
    assert rows["elu from sst2"]["mrpc"].recovered == pytest.approx((100 * 12 / 15 + 100 * 18 / 20) / 2)
    assert rows["softmax"]["mrpc"].recovered is None


def test_notes(table):
    said = " ".join(notes_of(table))
    assert "Means over 2 seeds" in said and "1 cells are missing" in said
    assert "Different from recipe minilm-glue: kernels, tasks, seeds, distil." in said


def test_the_verb(recipe, tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(plain(recipe)))
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(recipe)))
    code, out, _ = run(capsys, "results", folder)
    assert code == 0 and "51.00 +- 1.41" in out and "Different from recipe minilm-glue" in out
    code, out, err = run(capsys, "results", folder, "--format", "md")
    assert code == 0 and "| --- |" in out and err == ""
    code, out, _ = run(capsys, "results", tmp_path, "--format", "json")
    assert code == 0 and json.loads(out)[0]["changes"][0] == "minilm-glue"
    code, _, err = run(capsys, "results", folder, "--format", "html")
    assert code == 2 and "html" in err
