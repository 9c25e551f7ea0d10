"""Every recipe file is valid, and a dry run of each works without the network."""

from __future__ import annotations

import dataclasses
import re
from importlib import resources
from pathlib import Path

import pytest
import yaml
from support.tiny import SMALLER, original

from linearize.core.errors import ConfigError, LinearizeError, UnknownNameError
from linearize.jobs.recipes.recipe import cells, check, load_recipe, plain, recipe_names, resolve
from linearize.jobs.recipes.run import _open_folder
from linearize.jobs.recipes.schema import SOFTMAX
from linearize.jobs.recipes.stages import softmax_folder

FILES = sorted(Path(str(resources.files("linearize.recipes"))).rglob("*.y*ml"))
NAMED = {
    "flexformer-glue", "flexformer-transfer", "flexformer-lra", "flexformer-wikitext103", "hedgehog-glue",
    "hedgehog-gpt2-wikitext103", "hedgehog-associative-recall", "hedgehog-lra", "luna-glue", "luna-vit-imagenet",
    "luna-lra", "transnormer-wikitext103", "transnormer-glue", "transnormer-lra", "macformer-lra", "minilm-glue",
    "minilm-embedding", "minilm-long-documents", "minilm-long-retrieval", "minilm-transfer", "gpt2-small-wikitext2",
    "llama-small-wikitext2", "proof-minilm", "proof-minilm-long",
    "template", "vit-cifar10", "listops-small", "pixels-small", "retrieval-small", "associative-recall",
    "papers-small", "transnormer-small-wikitext2",
}  # fmt: skip


def test_none_is_left_out():
    assert {file.stem for file in FILES} == NAMED == set(recipe_names())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_recipe(file):
    recipe = load_recipe(str(file))
    text = file.read_text(encoding="utf-8")
    assert text.startswith(f"# linearize run {file.stem}"), "the command stands on top"
    assert all(len(line) <= 240 for line in text.splitlines())
    assert recipe.summary and recipe.needs
    assert check(plain(recipe), "again") == recipe, "what a run writes down is the recipe"
    wanted = cells(recipe)
    assert len({cell.key for cell in wanted}) == len(wanted)
    if recipe.paper is not None:
        assert recipe.figures, "a table of a paper has its figures"
        assert text.count("#") >= 2, "hyper-parameters have their source in comments"
        assert re.match(r"https://arxiv.org/abs/\d{4}\.\d{5}$", recipe.paper.url)
        known = {cell.row for cell in wanted}
        assert known & set(recipe.figures), "at least one row can be compared"


@pytest.mark.parametrize("name", sorted(NAMED))
def test_dry_run(name, capsys):
    from linearize.cli.main import main

    assert main(["run", name, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert name in out and "cells" in out


@pytest.mark.parametrize("name", sorted(NAMED))
def test_models_from_scratch_can_be_built(name):
    """Shrunk in depth and width, every config still makes a model of its task, with every kernel of the recipe."""
    from linearize.jobs.init import fresh_model
    from linearize.jobs.recipes.stages import convert

    recipe = load_recipe(name)
    if recipe.model.pretrained:
        return
    made = set()
    for job in resolve(recipe).values():
        config = dict(job.config)
        small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        small |= {"num_key_value_heads": 2, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 32}
        small |= {"max_position_embeddings": 64, "n_positions": 64}
        config |= {key: value for key, value in small.items() if key in config}
        if config["model_type"] != "vit":
            config |= {"vocab_size": 64, "pad_token_id": 0}
        labels = 10 if job.task.head.per_label else None
        # Tasks of one recipe often share the model.
        if (same := repr((config, job.task.head, labels))) in made:
            continue
        made.add(same)
        for kernel in recipe.kernels:
            model = fresh_model(config, job.task, labels)
            if kernel.name != SOFTMAX:
                # Of the two layers that are left, no more than one stays.
                layers = {number // 2: other for number, other in kernel.layers.items()}
                kernel = dataclasses.replace(kernel, keep_softmax=kernel.keep_softmax and (0,), layers=layers)
                assert type(convert(model, kernel, 0)).__qualname__.startswith("Linearized")


def load(tiny, write, **changes):
    return load_recipe(write({**tiny, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": ["elu"]}, r"recipe tiny: unknown key 'kernel'. Did you mean 'kernels'"),
        ({"model": {"name": "m", "matching_keys": True}}, r"matching_keys: only for a model trained from scratch"),
        ({"finetune": {"learning_rat": 1}}, r"tasks.cola.finetune: unknown key 'learning_rat'. Did you mean 'learning"),
        ({"finetune": {"learning_rate": "fast"}}, r"finetune.learning_rate: got 'fast', expected a number"),
        ({"finetune": {"batch_size": 1.5}}, r"finetune.batch_size: got 1.5, expected a whole number"),
        ({"finetune": {"batch_size": 0}}, r"stage two, batch_size: got 0"),
        ({"finetune": {"group_by_length": "yes"}}, r"group_by_length: got 'yes', expected true or false"),
        ({"finetune": {"schedule": "sine"}}, r"stage two, schedule: got 'sine'"),
        ({"distil": {"steps": True}}, r"distil.steps: got true, expected a whole number"),
        ({"distil": {"loss": "none"}}, r"stage one, loss: got 'none'"),
        ({"kernels": ["hedgehoc"]}, r"kernels\[0\]: unknown kernel 'hedgehoc'. Did you mean 'hedgehog'"),
        ({"kernels": [{"name": "luna", "args": {"chanels": 3}}]}, r"kernels\[0\]: unknown argument of kernel luna"),
        ({"kernels": [{"name": "elu", "layers": {1: "hedgehoc"}}]}, r"layers.1: unknown kernel 'hedgehoc'"),
        ({"kernels": [{"name": "elu", "layers": {1: {"nam": "luna"}}}]}, r"layers.1: unknown key 'nam'"),
        ({"kernels": [{"name": "elu", "layers": {"one": "luna"}}]}, r"layers: got 'one', expected numbers of layers"),
        (
            {"kernels": [{"name": "elu", "layers": {1: {"name": "softmax", "window": 4}}}]},
            r"layers.1: softmax takes no arguments",
        ),
        ({"kernels": [{"name": "softmax", "layers": {1: "luna"}}]}, r"softmax takes no arguments and no layers"),
        ({"kernels": [{"name": "elu", "window": 4, "exact_keys": 2}]}, r"exact-keys: got 2 .* use scale=linear"),
        ({"kernels": [{"nam": "luna"}]}, r"kernels\[0\]: unknown key 'nam'"),
        ({"kernels": ["elu", "elu"]}, r"two rows are called 'elu'"),
        # The same run twice had a deviation of 0 "over 2 seeds".
        ({"seeds": [0, 1, 0]}, r"seeds: got \[0, 1, 0\], expected different whole numbers from 0"),
        ({"seeds": [-1]}, r"seeds: got \[-1\], expected different whole numbers from 0 below 4,294,967,296"),
        ({"kernels": "elu"}, r"kernels: got 'elu', expected a list"),
        ({"kernels": []}, r"kernels: got none"),
        ({"tasks": ["cola", "mrcp"]}, r"tasks.mrcp: unknown task 'mrcp'. Did you mean 'mrpc'"),
        ({"tasks": {"x": {"task": "recall", "make": "listop"}}}, r"tasks.x: unknown made data set 'listop'"),
        (
            {"tasks": {"x": {"task": "recall", "make": "listops", "options": {"a": 1}}}},
            r"tasks.x: listops: unknown option 'a'",
        ),
        ({"tasks": {"cola": {"rows": {"max_lenght": 3}}}}, r"tasks.cola.rows: unknown key 'max_lenght'"),
        ({"flow": "finetune"}, r"flow: unknown flow 'finetune'. Did you mean 'finetuned'"),
        ({"sources": ["mrpc"]}, r"sources: expected tasks to distil on for flow transfer"),
        ({"model": {"name": "a", "package": "b"}}, r"model: got name 'a' and package 'b', expected a name or"),
        ({"model": {"pretrained": False}}, r"model: got pretrained false without config.model_type"),
        ({"model": {"pretrained": "no", "name": "a"}}, r"model.pretrained: got 'no', expected true or false"),
        ({"figures": {"elu": {"rte": 1}}}, r"figures.elu: unknown task 'rte'"),
        ({"figures": {"elu": {"cola": "high"}}}, r"figures.elu.cola: got 'high', expected a number"),
        ({"summary": None}, r"summary: got nothing, expected text"),
        ({"seeds": ["one"]}, r"seeds\[0\]: got 'one', expected a whole number"),
        ({"finetune": {"teacher": "bert"}}, r"teacher: got 'bert', expected true, false or softmax"),
        ({"finetune": {"teacher": 3}}, r"teacher: got 3, expected true or false or text"),
        ({"teacher": {"teacher": True}}, r"tasks.cola.teacher: unknown key 'teacher'"),
        ({"rows": {"extra_pairs": 1}}, r"rows.extra_pairs: re-paired texts have no label; set finetune.teacher"),
        ({"flow": "scratch", "finetune": {"teacher": True}}, r"finetune.teacher: got true, but flow scratch"),
        ({"rows": ["max_length"]}, r"rows: got a list, expected keys with values"),
        ({"tasks": ["cola", {"name": "cola"}]}, r"tasks\[1\]: got a section of keys, expected text"),
        # Both were "tasks: got a section of keys, expected a list of texts or keys with values".
        ({"tasks": {"cola": {"epochs": 3}}}, r"tasks.cola: unknown key 'epochs'"),
        ({"tasks": {"cola": None}}, r"tasks.cola: got nothing, expected keys with values"),
        # Scratch runs took the column as the task to train on first, and the table's averages replaced the other one.
        ({"tasks": {"pretrain": {"task": "cola"}}}, r"the name 'pretrain' is taken; give the task another name"),
        ({"tasks": {"average": {"task": "cola"}}}, r"the name 'average' is taken; give the task another name"),
        # The table took the row as the level of chance, and computed recovered shares with it.
        ({"kernels": [{"name": "elu", "label": "chance"}]}, r"kernels\[0\]: label: the name 'chance' is taken; give"),
        (
            {"kernels": [{"name": "elu", "label": "a/b"}, {"name": "elu", "label": "a b"}]},
            r"two cells are called 'a_b-cola-s0'; give a row or a task another name",
        ),
    ],
)
def test_what_is_wrong_is_named(tiny, write, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(tiny, write, **changes)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("recipe tiny")


def test_a_source_that_is_no_column_keeps_its_options(tiny, write, tmp_path):
    """With tasks=[...] a source lost them: other rows were distilled on, of another kind, under the same name."""
    assert resolve(load_recipe("minilm-transfer", ["tasks=[cola]"]))["sst2"].rows.limit == 10_000
    assert resolve(load_recipe("proof-minilm", ["tasks=[duplicates]"]))["stsb"].task.name == "similarity"
    assert resolve(load_recipe("proof-minilm-long", ["tasks=[needle-512]"]))["opened"].column.make == "articles"
    tiny |= {"flow": "transfer", "sources": ["mrpc"], "teacher": {}, "figures": {}}
    tiny["tasks"]["mrpc"] = {"score": ["f1"], "rows": {"max_length": 9}}
    whole, fewer = load_recipe(write(tiny)), load_recipe(write(tiny), ["tasks=[cola]"])
    assert list(fewer.columns) == ["cola"] and resolve(fewer)["mrpc"] == resolve(whole)["mrpc"]
    # The column comes back with its options, also into a run without it.
    again = check(plain(fewer), "run")
    assert again == fewer and load_recipe(write(plain(fewer)), ["tasks=[cola,mrpc]"]).columns == whole.columns
    for recipe, resume in ((fewer, False), (fewer, True), (whole, True)):
        _open_folder(recipe, tmp_path / "run", resume)
    other = load_recipe(write(tiny), ["tasks.mrpc.rows.max_length=8", "tasks=[cola]"])
    with pytest.raises(ConfigError, match="holds a run with another 'tasks'"):
        _open_folder(other, tmp_path / "run", True)


def test_kernels_of_single_layers(tiny, write):
    from linearize.jobs.recipes.stages import convert

    layers = {0: "softmax", 1: {"name": "hedgehog", "args": {"tied": False}, "window": 4}}
    row = load(tiny, write, kernels=["softmax", {"name": "elu", "layers": layers}]).kernels[1]
    model = convert(original("bert", **SMALLER, num_hidden_layers=3), row, 0)
    assert [layer["kernel"] for layer in model.config.linearize["layers"]] == ["softmax", "hedgehog", "elu"]
    assert model.config.linearize["layers"][1]["window"] == 4
    assert model.config.linearize["layers"][1]["arguments"]["tied"] is False


@pytest.mark.parametrize("flow", ["finetuned", "pretrained"])
def test_folders_stay_in_that_of_the_run(tiny, write, flow):
    """The softmax model of a task called ../../mine was written two folders above the run."""
    recipe = load(tiny, write, flow=flow, tasks={"../../mine": {"task": "cola"}}, teacher={}, figures={})
    for cell in cells(recipe):
        assert softmax_folder(recipe, cell).count("/") == 1 and "/" not in cell.key


def test_missing_keys_and_other_files(tiny, write, tmp_path):
    del tiny["flow"]
    with pytest.raises(ConfigError, match="the key 'flow' is missing"):
        load_recipe(write(tiny))
    with pytest.raises(UnknownNameError, match="Did you mean 'minilm-glue'"):
        load_recipe("minilm-gleu")
    for text, message in (("a: [", "cannot be read"), ("- a", "a list"), ("!!python/object:os.system {}", "be read")):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_recipe(str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize(
    ("values", "change", "message"),
    [
        ({}, "tasks=5", "unknown task '5'"),
        ({"tasks": {"cola": {}}}, "tasks=[[cola], {a: 1}]", "unknown task"),
        ({"tasks": 5}, "tasks.cola.label=x", "'tasks' is not a section of keys"),
        ({"kernels": None}, "kernels=[nothing]", "unknown kernel 'nothing'"),
        ({"tasks": {5: {}}}, "needs=time", "tasks.5: unknown task '5'"),
        ({"figures": {"elu": {5: 1.0}}}, "needs=time", "figures.elu: unknown task 5"),
    ],
)
def test_names_that_are_no_text_are_an_error_in_one_line(values, change, message, tiny, write):
    """A number or a list in place of a name ended in a traceback."""
    with pytest.raises(LinearizeError, match=message):
        load_recipe(write({**tiny, **values}), [change])


@pytest.mark.parametrize("change", ["data", "=3", "finetune..epochs=1", "kernels=[", "summary.x=1", "finetun.epochs=1"])
def test_wrong_changes(tiny, write, change):
    with pytest.raises(LinearizeError):
        load_recipe(write(tiny), [change])


def test_numbers_without_a_dot_are_numbers(tiny, write):
    assert yaml.safe_load("1e-5") == "1e-5", "YAML 1.1 reads it as text"
    tiny["finetune"]["learning_rate"] = "1e-5"
    assert cells(load_recipe(write(tiny)))[0].job.finetune.learning_rate == 1e-5
