"""Results as tables in other formats, and the marks of what was not made as the recipe says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from support.command_lines import run

from linearize.jobs.recipes.recipe import cells, load_recipe, plain
from linearize.jobs.recipes.results import changes_of, differences, make_table, notes_of, to_markdown
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
    return make_table(recipe, rows_of(recipe), "mine")


def test_what_was_changed_and_what_was_left_out(recipe):
    found = changes_of(recipe)
    assert found.recipe == "minilm-glue" and found.everywhere == ("distil.steps 10 (120)",)
    assert found.rows == {
        "hedgehog": ("args.activation exp (nothing)",), "e&u_1": ("not a row of the recipe",),
    }  # fmt: skip
    assert found.columns == {"stsb": ("finetune.epochs 1 (4)",)}
    assert found.left_out == ("task sst2", "task mrpc", "seed 2")
    assert found.of("softmax", "cola"), "a change of stage one holds everywhere"


@pytest.mark.parametrize("name", ["minilm-glue", "associative-recall", "luna-lra"])
def test_a_recipe_as_it_is_has_no_mark(name):
    for one in (load_recipe(name), load_recipe(name, ["data=here", "device=cpu"])):
        found = changes_of(one)
        assert (found.recipe, found.everywhere, found.rows, found.columns, found.left_out) == (name, (), {}, {}, ())
        assert not found.of("softmax", "cola")
    # What a run's folder holds is the resolved recipe.
    from linearize.jobs.recipes.recipe import check

    again = check(yaml.safe_load(yaml.safe_dump(plain(load_recipe(name)))), "here")
    assert changes_of(again).everywhere == () and changes_of(again).columns == {}


def test_only_what_differs_is_marked():
    found = changes_of(load_recipe("minilm-glue", ["tasks.stsb.finetune.epochs=1", "seeds=[0]"]))
    assert found.everywhere == () and found.left_out == ("seed 1", "seed 2")
    assert found.of("hedgehog", "stsb") and not found.of("hedgehog", "cola")
    own = replace(load_recipe("minilm-glue"), summary="a file of one's own", seeds=(7,))
    assert changes_of(own).recipe is None and not changes_of(own).of("softmax", "cola")
    assert differences({"a": 1, "b": 2}, {"b": 3, "c": 4}) == ("b 3 (2)", "c 4 (nothing)", "a nothing (1)")


def test_markdown(table):
    lines = to_markdown([table]).splitlines()
    assert lines[2] == "|  | cola | stsb | average |" and lines[3] == "| --- | ---: | ---: | ---: |"
    row = next(line for line in lines if line.startswith("| hedgehog"))
    assert row.startswith(r"| hedgehog | 51.00\* ± 1.41 (90.0 %) | 51.00\* ± 1.41 (90.0 %) |")
    assert all(line.replace(r"\|", "").count("|") == 5 for line in lines[2:7])
    assert any("distil.steps 10 (120)" in line for line in lines) and any("task sst2" in line for line in lines)


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
    table = make_table(recipe, made, "mine")
    assert list(table.rows)[-1] == "chance" and table.rows["chance"]["average"].ours == pytest.approx(65.0)
    cell = f"77.00 ({share})" if share else "35.00"
    lines = to_markdown([table]).splitlines()
    line = next(line for line in lines if line.lstrip("| ").startswith("elu")).replace("\\", "").replace("*", "")
    assert line.count(cell) == 3 and line.count("%") == (3 if share else 0), line
    assert any(line.lstrip("| ").startswith("chance") and line.count("65.00") == 3 for line in lines)


def test_notes(table):
    said = " ".join(notes_of(table))
    assert "Means over 2 seeds" in said and "1 cells are missing" in said
    assert "row hedgehog: args.activation exp (nothing)" in said and "task stsb: finetune.epochs 1 (4)" in said


def test_the_verb(recipe, tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(plain(recipe)))
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(recipe)))
    code, out, _ = run(capsys, "results", folder)
    assert code == 0 and "51.00* +- 1.41" in out and "* Not as in recipe minilm-glue" in out
    code, out, err = run(capsys, "results", folder, "--format", "md")
    assert code == 0 and "| --- |" in out and err == ""
    code, out, err = run(capsys, "results", tmp_path, "--format", "json")
    assert code == 0 and json.loads(out)[0]["changes"]["recipe"] == "minilm-glue" and err == ""
    code, _, err = run(capsys, "results", folder, "--plot", tmp_path / "made.png")
    assert code == 2 and "option --plot was removed" in err and "--format json" in err
    code, _, err = run(capsys, "results", folder, "--format", "html")
    assert code == 2 and "html" in err
