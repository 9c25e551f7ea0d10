"""Recipes run to the end, resume after an interruption, and show their table."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from linearize.checkpoint.fingerprint import UNKNOWN_INPUTS
from linearize.checkpoint.output import LOCKED_BY
from linearize.checkpoint.provenance import read_log
from linearize.core.errors import ConfigError, DataError, LinearizeError
from linearize.core.events import Noted
from linearize.jobs.events import Logged, StepDone
from linearize.jobs.recipes.recipe import cells, check, load_recipe
from linearize.jobs.recipes.results import _average, _entry, cell_text, read_rows, tables
from linearize.jobs.recipes.run import CellStarted, run_recipe
from linearize.jobs.recipes.schema import StageOne
from linearize.jobs.recipes.stages import _embeds_segments, batches_of
from linearize.training.alignment.loop import AlignStep
from linearize.training.stage_two.tasks import recovery, task

STAGES = ("teacher", "distil", "finetune")


def figures(rows):
    return {row["cell"]: row["metrics"] | {"score": row["score"]} for row in rows}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_values):
    """One uninterrupted run of the tiny recipe."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    return folder, run_recipe(check(tiny_values, "tiny"), folder)


def test_a_run_leaves_everything_behind(finished, tiny):
    folder, rows = finished
    assert [row["cell"] for row in rows] == [cell.key for cell in cells(check(tiny, "tiny"))]
    assert {path.name for path in folder.iterdir()} == {
        "recipe.yaml", "environment.json", "results.jsonl", "teachers", "distilled", "cells"
    }  # fmt: skip
    cell = folder / "cells" / "hedgehog-mrpc-s0"
    for name in ("config.json", "model.safetensors", "tokenizer.json", "stage.json", "log.jsonl"):
        assert (cell / name).is_file(), name
    provenance = json.loads((cell / "config.json").read_text())["linearize"]["provenance"]
    assert provenance["finetuning"]["task"] == "mrpc" and provenance["distillation"]["steps"] == 4
    log = read_log(folder / "distilled" / cell.name)
    assert [(entry["stage"], entry["step"]) for entry in log] == [("distillation", step) for step in (1, 2, 3, 4)]
    # What was tuned has the log of both stages.
    whole = read_log(cell)
    assert whole[:4] == log and {entry["stage"] for entry in whole[4:]} == {"finetuning"}
    assert json.loads((folder / "environment.json").read_text())["packages"]["torch"]
    by_key = {row["cell"]: row for row in rows}
    row = by_key["hedgehog-mrpc-s0"]
    assert row["score"] == row["metrics"]["f1"] and row["fidelity"]["after"]["kl"] is not None
    assert row["original"] == by_key["softmax-mrpc-s0"]["score"]
    teacher = json.loads((folder / "teachers" / "mrpc-s0" / "stage.json").read_text())
    expected = recovery(task("mrpc"), row["score"], row["original"], chance=row["chance"], interval=teacher["interval"])
    assert row["recovered"] == expected and teacher["chance"] == row["chance"]
    assert row["interval"][0] <= row["score"] <= row["interval"][1]
    assert by_key["t2r_as_it_is-cola-s0"]["distil"]["steps"] == 0
    assert by_key["softmax-cola-s0"]["paper"] == 58.8


def test_the_table_has_the_papers_figures_beside_ours(finished):
    folder, rows = finished
    (table,) = tables(folder)
    assert table.columns == ("cola", "mrpc", "average") and not table.missing and not table.damaged
    ours = {row["cell"]: 100 * row["score"] for row in rows}
    entry = table.rows["softmax"]["cola"]
    assert entry.ours == pytest.approx(ours["softmax-cola-s0"]) and entry.paper == 58.8
    assert table.rows["softmax"]["average"].paper == pytest.approx(74.5)
    average = table.rows["hedgehog"]["average"]
    assert average.ours == pytest.approx((ours["hedgehog-cola-s0"] + ours["hedgehog-mrpc-s0"]) / 2)
    chance = table.rows["chance"]
    assert [chance[name].ours for name in ("cola", "mrpc")] == [
        pytest.approx(100 * next(row["chance"] for row in rows if row["task"] == name)) for name in ("cola", "mrpc")
    ]
    assert chance["average"].ours == pytest.approx((chance["cola"].ours + chance["mrpc"].ours) / 2)
    shares = [table.rows["hedgehog"][name].recovered for name in ("cola", "mrpc")]
    assert (average.recovered is None) == (None in shares)
    assert table.rows["another"]["cola"].paper == 1.0 and table.rows["another"]["cola"].ours is None
    assert tables(folder.parent)[0].columns == table.columns


@pytest.mark.parametrize("when", [pytest.param(x, marks=[pytest.mark.slow] * (x == "teacher")) for x in STAGES])
def test_a_resumed_run_ends_like_an_uninterrupted_one(finished, tiny, tmp_path, when):
    _, expected = finished
    tiny |= {"kernels": ["softmax", "hedgehog"], "tasks": {"mrpc": {"score": ["f1"]}}, "figures": {}}
    recipe = check(tiny, "tiny")
    seen = {"log": 0}

    def stop(event):
        seen["log"] += isinstance(event, Logged)
        tuning = (tmp_path / "run" / ".work" / "cells").exists()
        at = {
            "teacher": isinstance(event, Logged) and seen["log"] == 4,
            "distil": isinstance(event, StepDone) and event.report.step == 3,
            "finetune": isinstance(event, Logged) and tuning and event.entry["step"] == 3,
        }
        if at[when]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, tmp_path / "run", on_event=stop)
    with pytest.raises(ConfigError, match="continue with --resume"):
        run_recipe(recipe, tmp_path / "run")
    with (tmp_path / "run" / "results.jsonl").open("a") as lines:
        lines.write('{"cell": "hedgehog-mrpc-s0", "sco')
    rows = run_recipe(recipe, tmp_path / "run", resume=True)
    wanted = figures(expected)
    for key, found in figures(rows).items():
        assert found == pytest.approx(wanted[key], abs=1e-6), key
    assert read_rows(tmp_path / "run")[1] == 0
    again = run_recipe(recipe, tmp_path / "run", resume=True, on_event=lambda event: pytest.fail(str(event)))
    assert figures(again) == figures(rows)


def test_the_tuned_softmax_model_is_the_teacher(tiny, sets, tmp_path):
    """Stage two is guided by the model of the first stage, of the same task and seed; texts are re-paired."""
    tiny |= {"kernels": ["softmax", "hedgehog"], "tasks": {"mrpc": {"rows": {"extra_pairs": 1}}}, "figures": {}}
    tiny |= {"seeds": [0, 1], "finetune": {**tiny["finetune"], "teacher": True, "kernel_learning_rate": 1e-4}}
    recipe = check(tiny, "tiny")
    rows = run_recipe(recipe, tmp_path / "run")
    assert [row["cell"] for row in rows] == [
        "softmax-mrpc-s0", "hedgehog-mrpc-s0", "softmax-mrpc-s1", "hedgehog-mrpc-s1"
    ]  # fmt: skip
    for row in rows:
        taught = row["row"] == "hedgehog"
        assert row["finetune"]["teacher"] == ("softmax" if taught else None)
        assert row["finetune"]["selection"]["by"] == (
            "divergence from the teacher and loss at the best temperature on the labels"
            if taught
            else "loss at the best temperature"
        )
        assert row["finetune"]["selection"]["rows"] == 9
    (table,) = tables(tmp_path / "run")
    ours = [100 * row["score"] for row in rows if row["row"] == "hedgehog"]
    entry = table.rows["hedgehog"]["mrpc"]
    assert table.seeds == 2 and entry.seeds == 2 and entry.ours == pytest.approx(sum(ours) / 2)
    assert entry.deviation == pytest.approx(abs(ours[0] - ours[1]) / 2**0.5)
    tiny["finetune"]["teacher"] = "softmax"
    assert check(tiny, "tiny").finetune["teacher"] == "softmax"


def test_a_recipe_aligns_between_its_stages(tiny, tmp_path):
    """Every row but the one that says not to; the rows that it measures on are held out of the training rows."""
    tiny |= {"kernels": ["hedgehog", {"name": "hedgehog", "label": "plain", "align": False}], "figures": {}}
    tiny |= {"tasks": {"mrpc": {"align": {"steps": 3}, "rows": {"extra_pairs": 0.5}}}}
    tiny |= {"align": {"steps": 2, "batch_size": 8, "eval_every": 1, "holdout": 8}}
    tiny["finetune"] |= {"teacher": True}
    seen = []
    rows = run_recipe(check(tiny, "tiny"), tmp_path / "run", on_event=seen.append)
    assert [row["row"] for row in rows] == ["hedgehog", "plain"]
    steps = [e.report for e in seen if isinstance(e, StepDone) and isinstance(e.report, AlignStep)]
    assert [data.step for data in steps] == [1, 2, 3]
    aligned, plain = (
        (tmp_path / "run" / "distilled" / f"{name}-mrpc-s0" / "stage.json") for name in ("hedgehog", "plain")
    )
    assert json.loads(aligned.read_text())["alignment"]["steps"] == 3
    assert "alignment" not in json.loads(plain.read_text())


@pytest.mark.sampled("one")
@pytest.mark.parametrize("flow", ["pretrained", "transfer"])
def test_the_softmax_row_is_the_teacher_of_models_that_were_not_tuned_first(tiny, tmp_path, flow):
    tiny |= {"flow": flow, "kernels": ["hedgehog"], "tasks": {"cola": {}}, "teacher": {}, "figures": {}}
    tiny["finetune"] |= {"teacher": True}
    tiny |= {"sources": ["mrpc"]} if flow == "transfer" else {}
    (row,) = run_recipe(check(tiny, "tiny"), tmp_path / "run")
    assert row["finetune"]["teacher"] == "softmax" and row["original"] is not None
    record = json.loads((tmp_path / "run" / "cells" / "softmax-cola-s0" / "stage.json").read_text())
    assert record["teacher"] is None and row["original"] == record["score"]


def test_the_averages_of_seeds_have_a_deviation():
    values = {"a": (0.5, 0.7), "b": (0.6, 0.4)}
    rows = [
        {"cell": f"elu-{task}-s{seed}", "row": "elu", "task": task, "seed": seed, "score": score, "percent": True}
        for task, scores in values.items()
        for seed, score in enumerate(scores)
    ]
    entry = _average(rows, "elu", {task: _entry(rows, "elu", task, None) for task in values}, None)
    assert entry.ours == pytest.approx(55.0) and entry.deviation == pytest.approx(0.0, abs=1e-9) and entry.seeds == 2
    # A task that is ahead by a seed moved the mean of the two seeds, to 52.5, beside their deviation and n=2.
    more = [*rows, {"row": "elu", "task": "a", "seed": 2, "score": 0.45, "percent": True}]
    ahead = {task: _entry(more, "elu", task, None) for task in values}
    assert _average(more, "elu", ahead, None) == entry
    assert _entry(rows, "elu", "a", None).deviation == pytest.approx(20 / 2**0.5)
    assert _entry(rows[:1], "elu", "a", None).deviation is None
    assert cell_text(_entry(rows, "elu", "a", None), 3) == "60.00 +- 14.14 n=2"


def test_resume_clears_what_a_killed_run_left(finished, tiny):
    folder, rows = finished
    for lock in (folder.with_name(".lock-tiny"), folder / "cells" / ".lock-hedgehog-mrpc-s0"):
        lock.write_text(f"{LOCKED_BY}999999999\n")
    assert run_recipe(check(tiny, "tiny"), folder, resume=True) == rows
    assert not list(folder.parent.rglob(".lock-*"))


def test_resume_refuses_another_recipe(finished, tiny):
    folder, _ = finished
    tiny["finetune"]["learning_rate"] = 1.0
    with pytest.raises(ConfigError, match="holds a run with another 'finetune'"):
        run_recipe(check(tiny, "tiny"), folder, resume=True)


def test_cells_may_be_added_and_run_apart(finished, tiny, tmp_path):
    """Two runs with --only, the second of a recipe that has grown, give the rows of one run."""
    _, expected = finished
    wanted = figures(expected)
    folder = tmp_path / "run"
    tiny |= {"kernels": ["softmax"], "figures": {}}
    first = run_recipe(check(tiny, "tiny"), folder, only=["*-mrpc-*"])
    assert [row["cell"] for row in first] == ["softmax-mrpc-s0"]
    tiny |= {"kernels": ["softmax", "hedgehog"], "needs": "other words"}
    recipe = check(tiny, "tiny")
    with pytest.raises(ConfigError, match=r"which matches no cell.*softmax-"):
        run_recipe(recipe, folder, resume=True, only=["mrpc"])
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["kernels"] == ["softmax"]
    started = []
    rows = run_recipe(
        recipe,
        folder,
        resume=True,
        only=["hedgehog-mrpc-*"],
        on_event=lambda event: started.append(event.key) if isinstance(event, CellStarted) else None,
    )
    assert started == ["hedgehog-mrpc-s0"] and {row["cell"] for row in rows} == {"softmax-mrpc-s0", "hedgehog-mrpc-s0"}
    for key, found in figures(rows).items():
        assert found == pytest.approx(wanted[key], abs=1e-6), key
    assert len(yaml.safe_load((folder / "recipe.yaml").read_text())["kernels"]) == 2
    with pytest.raises(ConfigError, match="holds a run with another 'kernels'"):
        run_recipe(check(tiny | {"kernels": ["softmax"]}, "tiny"), folder, resume=True)


def test_transfer(tiny, tmp_path):
    tiny |= {"flow": "transfer", "kernels": ["hedgehog"], "sources": ["mrpc"], "teacher": {}, "keep_models": False}
    tiny["figures"] = {"hedgehog from mrpc": {"cola": 58.0}}
    rows = run_recipe(check(tiny, "tiny"), tmp_path / "run")
    assert [(row["row"], row["task"], row["source"]) for row in rows] == [("hedgehog from mrpc", "cola", "mrpc")]
    assert rows[0]["paper"] == 58.0
    assert not list((tmp_path / "run").rglob("*.safetensors")) and list((tmp_path / "run").rglob("finetuning.json"))


@pytest.mark.parametrize("flow", ["transfer", "finetuned"])
def test_cells_are_added_to_a_finished_run_whose_weights_are_gone(tiny, tmp_path, flow):
    """Conversions that tasks share, and with keep_models=false the tuned softmax models too, are made again."""
    tasks = {"cola": {}, "short": {"task": "cola", "folder": "cola", "rows": {"max_length": 8}}}
    tiny |= {"kernels": ["softmax", "hedgehog"], "tasks": tasks, "figures": {}}
    if flow == "transfer":
        tiny |= {"flow": flow, "sources": ["mrpc"], "teacher": {}}
        fewer = tiny | {"tasks": {"cola": {}}}
    else:
        tiny |= {"keep_models": False}
        fewer = tiny | {"kernels": ["softmax"]}
    expected = run_recipe(check(tiny, "tiny"), tmp_path / "whole")
    run_recipe(check(fewer, "tiny"), tmp_path / "run")
    rows = run_recipe(check(tiny, "tiny"), tmp_path / "run", resume=True)
    assert figures(rows) == figures(expected)
    assert not list((tmp_path / "run" / "distilled").rglob("*.safetensors"))


def test_pretrained(tiny, tmp_path):
    tiny |= {"flow": "pretrained", "kernels": ["softmax", "elu"], "tasks": {"cola": {}}, "teacher": {}}
    tiny["figures"] = {}
    rows = run_recipe(check(tiny, "tiny"), tmp_path / "run")
    assert [row["row"] for row in rows] == ["softmax", "elu"]
    assert rows[1]["original"] == rows[0]["score"] and rows[1]["distil"]["steps"] == 0


def test_from_scratch_on_made_data(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tune = {"learning_rate": 1e-3, "batch_size": 8, "steps": 4}
    made = {"train": 16, "validation": 8}
    recipe = {
        "summary": "made",
        "flow": "scratch",
        "kernels": ["softmax", {"name": "exp", "label": "exp 2", "args": {"temperature": 2.0}}],
        "tasks": {
            "listops": {
                "task": "text-classification",
                "make": "listops",
                "options": {**made, "shortest": 5, "longest": 30},
                "model": {"model_type": "bert"},
            },
            "recall": {
                "make": "associative-recall",
                "options": {**made, "length": 16},
                "model": {"model_type": "llama"},
            },
        },
        "model": {"pretrained": False, "config": {"model_type": "bert", **sizes}},
        "rows": {"max_length": 32},
        "finetune": tune,
        "device": "cpu",
    }
    rows = run_recipe(check(recipe, "made"), tmp_path / "run")
    assert len(rows) == 4 and all(0 <= row["score"] <= 1 for row in rows)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "cells" / "exp_2-recall-s0")
    assert type(model).__qualname__ == "LinearizedLlamaForCausalLM"


@pytest.mark.parametrize("flow", ["finetuned", "untuned"])
def test_the_config_of_a_checkpoint_is_changed(tmp_path, checkpoint, sets, flow):
    recipe = {
        "summary": "without dropout",
        "flow": flow,
        "kernels": ["elu"],
        "tasks": {"cola": {"model": {"attention_probs_dropout_prob": 0.0}}},
        "model": {"name": checkpoint, "config": {"hidden_dropout_prob": 0.25}},
        "data": str(sets),
        "rows": {"max_length": 20, "limit": 32},
        "teacher": {"steps": 1, "batch_size": 8},
        "distil": {"steps": 1, "batch_size": 8, "holdout": 8},
        "finetune": {"steps": 1, "batch_size": 8},
        "device": "cpu",
    }
    run_recipe(check(recipe, "made"), tmp_path / "run")
    made = next(path.parent for path in (tmp_path / "run").rglob("config.json") if path.parent.name.startswith("elu"))
    config = json.loads((made / "config.json").read_text())
    assert (config["hidden_dropout_prob"], config["attention_probs_dropout_prob"]) == (0.25, 0.0)
    recipe["model"]["config"] = {"hiden_dropout_prob": 0.0}
    with pytest.raises(ConfigError, match=r"model.config: unknown key 'hiden_dropout_prob'. Did you mean 'hidden_drop"):
        run_recipe(check(recipe, "made"), tmp_path / "wrong")


def test_words_are_learned_from_a_made_data_set(tmp_path):
    for split in ("train", "validation"):
        texts = [f"{split} word{n} is here {n} there" for n in range(16)]
        (tmp_path / f"{split}.txt").write_text("\n".join(texts) + "\n")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    recipe = {
        "summary": "halves",
        "flow": "scratch",
        "kernels": ["elu"],
        "tasks": {
            "halves": {
                "task": "text-classification",
                "make": "retrieval-halves",
                "dataset": str(tmp_path),
                "columns": ["text1", "text2"],
                "tokenizer": {"kind": "words"},
            }
        },
        "model": {"pretrained": False, "config": {"model_type": "bert", **sizes}},
        "rows": {"max_length": 16},
        "finetune": {"batch_size": 8, "steps": 1},
        "device": "cpu",
    }
    (row,) = run_recipe(check(recipe, "made"), tmp_path / "run")
    assert 0 <= row["score"] <= 1
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "cells" / "elu-halves-s0")
    known = tokenizer.get_vocab()
    assert {"train", "word0", "word15"} <= set(known), "words of both halves"
    assert "validation" not in known
    assert tokenizer("is here", "there")["token_type_ids"] == [0, 0, 0, 0, 1], "BERT tells the two texts apart"
    for kind, embeds in (("bert", True), ("distilbert", False), ("no such model", False)):
        assert _embeds_segments({"model_type": kind}) is embeds


def test_scratch_with_a_first_task(tmp_path, sets):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    recipe = {
        "summary": "pre-training",
        "flow": "scratch",
        "kernels": ["transnormer_t2"],
        "tasks": ["cola"],
        "model": {
            "pretrained": False,
            "config": {"model_type": "roberta", "type_vocab_size": 1, **sizes},
            "tokenizer": {"kind": "words"},
        },
        "data": str(sets / "cola"),
        "rows": {"max_length": 32},
        "pretrain_task": {"task": "masked-lm", "columns": ["sentence"]},
        "pretrain": {"steps": 4, "batch_size": 4},
        "finetune": {"steps": 4, "batch_size": 8},
        "device": "cpu",
    }
    rows = run_recipe(check(recipe, "pre"), tmp_path / "run")
    assert [row["cell"] for row in rows] == ["transnormer_t2-cola-s0"]
    assert (tmp_path / "run" / "pretrained" / "transnormer_t2-s0" / "config.json").is_file()


def test_a_language_model_trained_here_and_converted(tmp_path):
    (tmp_path / "wikitext2").mkdir()
    for split in ("train", "validation"):
        text = "\n".join(["the cat sat on the mat and the dog ran far away"] * 20)
        (tmp_path / "wikitext2" / f"{split}.txt").write_text(text)
    recipe = {
        "summary": "language",
        "flow": "finetuned",
        "kernels": ["softmax", "hedgehog"],
        "tasks": {"wikitext2": {"task": "causal-lm"}},
        "model": {
            "pretrained": False,
            "config": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2},
            "tokenizer": {"kind": "pieces", "size": 280},
        },
        "data": str(tmp_path),
        "rows": {"max_length": 16},
        "teacher": {"steps": 6, "batch_size": 4, "learning_rate": 1e-2},
        "distil": {"steps": 2, "batch_size": 4, "holdout": 4},
        "finetune": {"steps": 2, "batch_size": 4},
        "device": "cpu",
    }
    rows = run_recipe(check(recipe, "lm"), tmp_path / "run")
    assert rows[1]["recovered"] == pytest.approx(100 * rows[0]["score"] / rows[1]["score"])
    assert rows[1]["facts"]["stride"] == 15 and rows[1]["lower_is_better"]
    (table,) = tables(tmp_path / "run")
    assert table.rows["hedgehog"]["wikitext2"].ours == pytest.approx(rows[1]["metrics"]["perplexity"])


def test_batches_of_stage_one_are_the_same_for_any_number_of_processes(sets, checkpoint):
    from linearize.checkpoint.loading import load_processor
    from linearize.training.stage_two.prepare import prepare

    data = prepare(task("cola"), load_processor(checkpoint, "text"), data=str(sets))
    one, two = (batches_of(data, StageOne(batch_size=size, holdout=10), 3) for size in (8, 4))
    whole = next(one.train_batches(2))["attention_mask"].sum()
    parts = sum(next(two.train_batches(2, rank, 2))["attention_mask"].sum() for rank in (0, 1))
    # 9 of the 48 training rows are held out; the validation rows are left alone.
    assert whole == parts and one.steps_per_epoch == 5
    held = one.holdout_batches()
    assert [len(batch["input_ids"]) for batch in held] == [8, 1]
    rows = [data.train[place]["input_ids"] for place in one.held.places]
    assert [ids[: len(row)].tolist() for ids, row in zip(held[0]["input_ids"], rows, strict=False)] == rows[:8]
    assert set(next(one.train_batches())) == {"input_ids", "attention_mask"}


def test_missing_data_is_told_before_anything_is_made(tiny, tmp_path):
    for data, message in ((str(tmp_path / "none"), "does not exist"), (str(tmp_path), "has no folder 'cola'")):
        tiny["data"] = data
        with pytest.raises(DataError, match=message):
            run_recipe(check(tiny, "tiny"), tmp_path / "run")
        assert not (tmp_path / "run").exists()
        (tmp_path / "mrpc").mkdir(exist_ok=True)


def test_results_of_nothing(tmp_path):
    with pytest.raises(DataError, match="holds no run"):
        tables(tmp_path)
    (tmp_path / "recipe.yaml").write_text("summary: [")
    with pytest.raises(LinearizeError, match="cannot be read"):
        tables(tmp_path)


def test_half_written_results_are_shown(finished, tmp_path):
    import shutil

    folder, rows = finished
    for name in ("recipe.yaml", "results.jsonl"):
        shutil.copy(folder / name, tmp_path / name)
    text = (tmp_path / "results.jsonl").read_text()
    (tmp_path / "results.jsonl").write_text(text[: len(text) - 40])
    (table,) = tables(tmp_path)
    assert table.damaged == 1 and table.missing == 1
    # Five cells, two averages, and three levels of chance.
    assert sum(entry.ours is not None for line in table.rows.values() for entry in line.values()) == 5 + 2 + 3
    assert len(rows) == 6


def test_changes(tiny, write):
    name = write(tiny)
    recipe = load_recipe(name, ["kernels=[t2r as it is,elu]", "tasks=[cola]", "finetune.learning_rate=1e-5", "seeds=3"])
    assert [kernel.called for kernel in recipe.kernels] == ["t2r as it is", "elu"]
    assert recipe.kernels[0].distil is False and recipe.seeds == (3,)
    assert recipe.finetune["learning_rate"] == "1e-5" and cells(recipe)[0].job.finetune.learning_rate == 1e-5
    assert list(recipe.columns) == ["cola"] and recipe.figures["softmax"] == {"cola": 58.8}


def changed_model(root, sets, checkpoint):
    from safetensors.torch import load_file, save_file

    file = root / "model" / "model.safetensors"
    weights = load_file(file)
    weights["embeddings.word_embeddings.weight"] *= 2
    save_file(weights, file, metadata={"format": "pt"})


def changed_data(root, *_):
    file = root / "sets" / "cola" / "validation.jsonl"
    file.write_text(file.read_text().replace("good", "very"))


def changed_training_data(root, *_):
    file = root / "sets" / "cola" / "train.jsonl"
    file.write_text(file.read_text().replace("good", "very"))


ADDED = {"a row": {"kernels": ["softmax", "elu", "relu"]}, "a seed": {"seeds": [0, 1]}}


@pytest.mark.sampled("values")
@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("change", [changed_model, changed_data, changed_training_data])
def test_resume_refuses_what_changed_under_the_same_name(change, added, tiny, sets, checkpoint, tmp_path):
    """A table had cells of two models, or of two data sets, without a word."""
    shutil.copytree(sets, tmp_path / "sets")
    shutil.copytree(checkpoint, tmp_path / "model")
    few = {"flow": "untuned", "kernels": ["softmax", "elu"], "figures": {}, "distil": {"steps": 1, "holdout": 4}}
    few |= {"tasks": {"cola": {"task": "retrieval", "folder": "cola", "columns": ["sentence"]}}}
    values = {**tiny, **few, "data": str(tmp_path / "sets"), "model": {"name": str(tmp_path / "model")}}
    for name in ("finetune", "teacher"):
        del values[name]
    folder = tmp_path / "run"
    rows = run_recipe(check(values, "tiny"), folder)
    before = (folder / "results.jsonl").read_bytes()
    change(tmp_path, sets, checkpoint)
    with pytest.raises(ConfigError, match=r"resume: the run was started with (model contents|contents of the data of)"):
        run_recipe(check(values | ADDED[added], "tiny"), folder, resume=True)
    assert (folder / "results.jsonl").read_bytes() == before
    # A run of an earlier version has no record of that: it goes on, and says so.
    for file in folder.glob("*/*/stage.json"):
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "inputs"}))
    told = []
    more = run_recipe(check(values | ADDED[added], "tiny"), folder, resume=True, on_event=told.append)
    assert len(more) > len(rows)
    assert [one.text for one in told if isinstance(one, Noted)] == [UNKNOWN_INPUTS]
