"""Rows of a table that read the same data at different lengths."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

from linearize.core.errors import ConfigError
from linearize.jobs.recipes.recipe import check
from linearize.jobs.recipes.results import tables
from linearize.jobs.recipes.run import run_recipe
from linearize.jobs.recipes.schema import Row
from linearize.jobs.recipes.stages import lengthen
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.load import load_for_task
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.tasks import task
from linearize.training.stage_two.trainer import measure_with_interval

LINEAR = {"name": "hedgehog", "rows": {"max_length": 48}}
CHUNKS = {"name": "softmax", "label": "softmax, chunks", "rows": {"max_length": 6, "chunks": True}}


def facts(rows: list[dict]) -> list[tuple]:
    return [(row["row"], row["facts"]["max_length"], row["facts"].get("chunks", 0) > 0) for row in rows]


def test_halves_are_found_at_the_length_of_each_row(tiny, sets, checkpoint, tmp_path):
    values = {name: tiny[name] for name in ("summary", "model", "data", "device")}
    recipe = check(
        {
            **values,
            "flow": "untuned",
            "kernels": ["softmax", CHUNKS, LINEAR],
            "tasks": {"texts": {"task": "retrieval", "folder": "cola", "columns": ["sentence"]}},
            "rows": {"max_length": 16},
            "distil": {"steps": 2, "batch_size": 4, "holdout": 4, "max_length": 8},
            "align": {"steps": 2, "batch_size": 4, "holdout": 4, "max_length": 40},
        },
        "recipe",
    )
    rows = run_recipe(recipe, tmp_path / "run")
    assert facts(rows) == [("softmax", 16, False), ("softmax, chunks", 6, True), ("hedgehog", 48, False)]
    config = AutoConfig.from_pretrained(tmp_path / "run" / "distilled" / "hedgehog-texts-s0")
    assert config.max_position_embeddings == 48
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "distilled" / "hedgehog-texts-s0").model_max_length == 48
    data = prepare(
        task("retrieval", columns=["sentence"]),
        AutoTokenizer.from_pretrained(checkpoint),
        DataOptions(max_length=6, chunks=True),
        data=str(sets / "cola"),
    )
    measured = measure_with_interval(load_for_task(checkpoint, data).eval(), data)
    assert rows[1]["score"] == measured.score and rows[1]["metrics"] == pytest.approx(measured.metrics)
    stage = json.loads((tmp_path / "run" / "cells" / "softmax-texts-s0" / "stage.json").read_text())
    assert stage["chance"] == 1 / 16 and len(stage["interval"]) == 2


def test_a_tuned_model_is_measured_in_chunks_and_a_longer_one_tuned_at_its_length(tiny, tmp_path):
    kernels = ["softmax", CHUNKS, {**LINEAR, "rows": {"max_length": 40}}]
    recipe = check({**tiny, "flow": "pretrained", "kernels": kernels, "tasks": ["cola"], "figures": {}}, "recipe")
    rows = run_recipe(recipe, tmp_path / "run")
    assert facts(rows) == [("softmax", 20, False), ("softmax, chunks", 6, True), ("hedgehog", 40, False)]
    assert not list((tmp_path / "run" / "cells" / "softmax__chunks-cola-s0").glob("*.safetensors"))
    record = json.loads((tmp_path / "run" / "cells" / "hedgehog-cola-s0" / "finetuning.json").read_text())
    assert record["max_length"] == 40


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ({"name": "hedgehog", "rows": {"chunks": True}}, r"kernels\[0\]: rows: .*chunks"),
        ({"name": "softmax", "rows": {"max_length": 8}}, "needs its own label"),
        ({"name": "softmax", "rows": {"limit": 3}}, r"kernels\[0\]: rows: .*limit"),
        (
            {"name": "softmax", "label": "cut", "rows": {"max_length": "long"}},
            r"kernels\[0\]\.rows\.max_length: got 'long'",
        ),
        ({**LINEAR, "positions": "stretch"}, "unknown positions 'stretch'"),
        ({"name": "hedgehog", "positions": "interpolate"}, "only for a converted model with rows.max_length"),
        ({**CHUNKS, "positions": "interpolate"}, "only for a converted model with rows.max_length"),
    ],
)
def test_what_a_row_cannot_read(tiny, kernel, message):
    with pytest.raises(ConfigError, match=message):
        check({**tiny, "kernels": [kernel]}, "recipe")


def test_positions_that_are_not_there(tiny, tmp_path):
    kernels = [{"name": "softmax", "label": "long", "rows": {"max_length": 64}}]
    recipe = check({**tiny, "flow": "pretrained", "kernels": kernels, "tasks": ["cola"], "figures": {}}, "recipe")
    with pytest.raises(ConfigError, match="takes at most 32 tokens"):
        run_recipe(recipe, tmp_path / "run")


def test_positions_of_a_row_are_tiled_or_stretched(checkpoint):
    def table(positions):
        model = AutoModel.from_pretrained(checkpoint)
        row = Row("hedgehog", rows={"max_length": 48}, positions=positions)
        lengthen(model, AutoTokenizer.from_pretrained(checkpoint), row)
        return model.embeddings.position_embeddings.weight.detach()

    short = AutoModel.from_pretrained(checkpoint).embeddings.position_embeddings.weight.detach()
    tiled, stretched = table("tile"), table("interpolate")
    assert len(tiled) == len(stretched) == 48 and len(short) == 32
    assert torch.equal(tiled[:32], short) and torch.equal(tiled[32:], short[:16])
    assert torch.equal(stretched[[0, 47]], short[[0, 31]]) and not torch.equal(stretched[1], short[1])


def test_windows_of_another_length_have_no_share_of_softmax(tmp_path):
    """A perplexity of longer windows was given as 103 % of softmax's of shorter ones."""
    from support.tasks import WORDS, causal_folder, write

    causal_folder(tmp_path / "model", 32)
    for split in ("train", "validation"):
        write(tmp_path / "texts" / f"{split}.jsonl", [{"text": " ".join(WORDS[n % 7] for n in range(99))}] * 4)
    stage = {"steps": 1, "batch_size": 4, "holdout": 4}
    values = {
        "summary": "windows",
        "flow": "untuned",
        "model": {"name": str(tmp_path / "model")},
        "kernels": ["softmax", "elu", {"name": "elu", "label": "longer", "rows": {"max_length": 24}}],
        "tasks": {"texts": {"task": "causal-lm", "dataset": str(tmp_path / "texts")}},
        "rows": {"max_length": 16},
        "distil": stage,
        "device": "cpu",
    }
    softmax, elu, longer = run_recipe(check(values, "recipe"), tmp_path / "run")
    assert elu["recovered"] == pytest.approx(100 * softmax["score"] / elu["score"])
    assert longer["recovered"] is longer["original"] is None and longer["score"] > 1
    (table,) = tables(tmp_path / "run")
    assert [table.rows[name]["texts"].recovered is None for name in ("elu", "longer")] == [False, True]
    # Older results have no hash of their rows, but the length of their windows.
    results = tmp_path / "run" / "results.jsonl"
    rows = [{k: v for k, v in row.items() if k != "scored"} for row in (softmax, elu, longer)]
    results.write_text("".join(json.dumps({**row, "original": None}) + "\n" for row in rows))
    (table,) = tables(tmp_path / "run")
    assert [table.rows[name]["texts"].recovered is None for name in ("elu", "longer")] == [False, True]
