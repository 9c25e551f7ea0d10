"""`linearize search`, `convert --kernel auto` and `--plan`: what is written, resumed and refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from PIL import Image
from support.checkpoints import make_original, texts
from support.command_lines import run
from support.training import loud
from transformers import AutoModel

from linearize.attention.interface import linear_attentions
from linearize.modeling.plan import Plan

DATA = ("--dataset", "texts.jsonl", "--text-column", "text", "--device", "cpu", "--holdout", 8, "--batch-size", 4)
QUICK = (*DATA, "--distill-length", 16, "--candidates", "hedgehog,t2r,flexformer_n", "--no-native")
SEARCH = (*QUICK, "--steps", 6)
CONVERT = ("--kernel", "auto", *QUICK, "--search-steps", 6, "--distill-steps", 2, "--align-steps", 0)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_original(tmp_path / "bert")
    texts(tmp_path, 40)
    return tmp_path


@pytest.mark.usefixtures("given_costs")
def test_the_table_the_plan_and_the_picture(place, capsys):
    code, out, err = run(capsys, "search", "bert", *SEARCH, "--plan-out", "plan.yaml", "--plot", "points.png")
    assert code == 0, err
    assert "within 0.2 times softmax's time at 4,096 tokens" in out, out
    # Cells of tables are folded between words.
    assert "softmax everywhere" in out and "hedgehog" in out
    assert re.search(
        r"(\d+\.\d% below|as large as) that of hedgehog everywhere, at 0\.\d+ times softmax's time|is as good: error",
        out,
    )
    assert (place / "points.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in place.iterdir()) == ["bert", "plan.yaml", "points.png", "texts.jsonl"]
    plan = yaml.safe_load((place / "plan.yaml").read_text())
    assert [layer["layer"] for layer in plan["layers"]] == [0, 1] and all(layer["why"] for layer in plan["layers"])
    # Edited, and given back.
    plan["layers"][0] |= {"kernel": "softmax", "arguments": {}, "why": "mine"}
    plan["layers"][1] |= {"kernel": "hedgehog", "arguments": {"tied": False}, "window": 8}
    (place / "plan.yaml").write_text(yaml.safe_dump(plan))
    line = ("convert", "bert", "--plan", "plan.yaml", *DATA, "--distill-steps", 0, "--align-steps", 0, "--no-native")
    code, out, err = run(capsys, *line)
    assert code == 0, err
    config = json.loads((place / "bert-mixed" / "config.json").read_text())["linearize"]
    first, second = config["layers"]
    assert (first["kernel"], first["reason"]) == ("softmax", "mine")
    assert (second["kernel"], second["arguments"], second["window"]) == ("hedgehog", {"tied": False}, 8)
    assert config["provenance"]["plan"]["why"]["0"] == "mine"
    assert len(linear_attentions(AutoModel.from_pretrained("bert-mixed"))) == 1


@pytest.mark.usefixtures("given_costs")
def test_search_and_convert_in_one(place, capsys):
    code, out, err = run(capsys, "convert", "bert", *CONVERT, "--plan-out", "plan.yaml", "--json")
    assert code == 0, err
    made = json.loads(out)
    section = json.loads((place / "bert-auto" / "config.json").read_text())["linearize"]
    searched = section["provenance"]["search"]
    labels = [layer["label"] for layer in searched["layers"]]
    assert [layer["kernel"] for layer in section["layers"]] == [label.partition(":")[0] for label in labels]
    assert all(layer["why"] for layer in searched["layers"]) and searched["points"][0]["name"].startswith("the plan")
    assert made["plan"]["layers"] == section["layers"]
    code, out, _ = run(capsys, "inspect", "bert-auto")
    assert code == 0 and "why layer 1" in out and "search, the plan" in out and "6 steps," in out
    card = (place / "bert-auto" / "README.md").read_text()
    assert "A search chose the kernel of every layer within 0.2 times softmax's time at 4,096 tokens" in card
    assert "\n    linearize convert bert --kernel auto " in card and " --candidates hedgehog,t2r" in card
    assert "| search | 6 steps, " in card
    plan = searched["points"][0]
    assert f"at {plan['share']:.3g} of that time, with error {plan['error']:.4g} (" in card
    for layer in searched["layers"]:
        row = next(
            one for one in card.splitlines() if f"`{layer['module']}` | {layer['label'].partition(':')[0]}" in one
        )
        assert layer["why"].partition(":")[0].replace("_", r"\_") in row
    # The kernels began with what the search had taught them: stage one did not start from scratch.
    assert made["distillation"]["before"]["mean"]["output_error"] < 1
    errors = [layer["output_error"] for layer in made["distillation"]["before"]["layers"]]
    assert errors == pytest.approx([layer["error"] for layer in searched["layers"]], rel=1e-3)
    assert Plan.from_dict(section).converted


@pytest.mark.usefixtures("given_costs")
def test_heads_are_chosen_after_a_search(place, capsys):
    code, _, err = run(capsys, "convert", "bert", *CONVERT, "--keep-softmax-heads", 3)
    assert code == 0, err
    section = json.loads((place / "bert-auto" / "config.json").read_text())["linearize"]
    heads = [tuple(layer.get("softmax_heads", ())) for layer in section["layers"]]
    assert sum(map(len, heads)) == 3
    kernels = [layer["label"].partition(":")[0] for layer in section["provenance"]["search"]["layers"]]
    assert [layer["kernel"] for layer in section["layers"]] == kernels
    loaded = linear_attentions(AutoModel.from_pretrained("bert-auto")).values()
    assert [layer.hybrid.softmax_heads for layer in loaded] == heads
    code, _, err = run(capsys, "convert", "bert", *CONVERT, "--keep-softmax-heads", "0:1", "--output", "other")
    assert code == 2 and "--keep-softmax-heads: --kernel auto chooses" in err and not (place / "other").exists()


@pytest.mark.usefixtures("given_costs")
@pytest.mark.parametrize("name", ["vit", "llama"])
def test_models_of_images_and_those_that_write(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = ("--kernel", "auto", "--search-steps", 3, "--distill-steps", 1, "--align-steps", 0, "--budget", "softmax=1")
    line = (*line, "--holdout", 4, "--batch-size", 2, "--no-native", "--device", "cpu", "--output", "made", "--json")
    if name == "vit":
        head = "AutoModelForImageClassification"
        (tmp_path / "images").mkdir()
        for number in range(12):
            Image.new("RGB", (30, 30), (20 * number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
        line = (*line, "--dataset", "images")
    else:
        head = "AutoModelForCausalLM"
        texts(tmp_path, 20)
        line = (*line, "--dataset", "texts.jsonl", "--text-column", "text", "--distill-length", 16)
    make_original(tmp_path / name, name, head)
    # The same, with an attention that counts for something.
    loud(name, head).save_pretrained(tmp_path / name)
    code, out, err = run(capsys, "convert", name, *line, "--candidates", "hedgehog,luna,polaformer")
    assert code == 0, err
    made = json.loads(out)
    assert sorted(layer["kernel"] == "softmax" for layer in made["plan"]["layers"]) == [False, True]
    searched = json.loads((tmp_path / "made" / "config.json").read_text())["linearize"]["provenance"]["search"]
    points = {point["name"]: point["error"] for point in searched["points"]}
    assert searched["figure"] == "logits, nats" and points["softmax everywhere"] == pytest.approx(0, abs=1e-6)
    assert points["the plan"] < points["hedgehog everywhere"]
    assert set(searched["layers"][0]["tried"]) == {"hedgehog", "luna", "polaformer"}


@pytest.mark.usefixtures("given_costs")
def test_the_bill_of_a_search(place, capsys):
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    line = (*CONVERT[:2], *QUICK, "--search-steps", 300, "--budget", "softmax=1")
    line = (*line, "--distill-steps", 40, "--align-steps", 0, "--dry-run")
    code, out, err = run(capsys, "convert", "bert", *line, "--json")
    assert code == 0, err
    bill = json.loads(out)["bill"]
    first, second = bill["stages"]
    assert (first["stage"], first["steps"], first["rows"], first["timed"]) == ("the search", 300, 4, 7)
    assert (second["stage"], second["steps"]) == ("stage one", 40)
    assert first["seconds"] > 290 * first["seconds_per_step"] and bill["seconds"] > first["seconds"]
    assert "with the plan that a few steps of the search chose" in err and "It fits." in err
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("given_costs")
def test_ctrl_c_and_resume(place, capsys, monkeypatch):
    from linearize.kernel_search.whole import WholeModel

    line = ("convert", "bert", *CONVERT, "--save-every", 2)
    whole = run(capsys, *line, "--output", "whole")
    assert whole[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(WholeModel, "decide", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        code, _, err = run(capsys, *line, "--output", "made")
    assert code == 130 and "the state of step 6 is in made.search; resume with the same line and --resume" in err
    assert [path.name for path in place.iterdir() if path.name.startswith("made")] == ["made.search"]
    code, _, err = run(capsys, *line, "--output", "made")
    assert code == 2 and "interrupted run" in err
    assert run(capsys, *line, "--output", "made", "--resume")[0] == 0
    assert not (place / "made.search").exists()
    assert (place / "made" / "model.safetensors").read_bytes() == (place / "whole" / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("given_costs")
def test_a_resumed_conversion_may_write_its_plan_again(place, capsys, monkeypatch):
    """Interrupted after the search, "the same line and --resume" refused the plan's file."""
    line = ("convert", "bert", *CONVERT, "--save-every", 2, "--plan-out", "own.yaml")
    with monkeypatch.context() as patch:
        patch.setattr("linearize.jobs.stages.distill", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        code, _, err = run(capsys, *line)
    assert code == 130 and "the same line and --resume" in err and (place / "own.yaml").exists()
    code, _, err = run(capsys, *line, "--resume")
    assert code == 0, err


@pytest.mark.usefixtures("given_costs")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("search bert --candidates hedgehog", "got one candidate (hedgehog), and nothing to choose between"),
        ("search bert --candidates hedgehog,hedgehug", "unknown kernel 'hedgehug'. Did you mean 'hedgehog'?"),
        (
            "search bert --candidates hedgehog,t2r --budget cost=0.01",
            "the smallest possible is --budget cost=0.1",
        ),
        ("search bert --budget price=1", "unknown budget 'price'"),
        ("search bert --plan-out plan.txt", "expected the name of a .yaml or .yml file"),
        (
            "search bert --plan-out nowhere/plan.yaml",
            "error: --plan-out: got 'nowhere/plan.yaml', expected a file in an ex",
        ),
        ("search bert --plot points.svg", "expected the name of a .png file"),
        ("search bert --no-memory", "unknown option '--no-memory'"),
        ("search bert --remeasure", "unknown option '--remeasure'"),
        ("search nowhere", "nowhere"),
        ("search bert --candidates t2r,elu --steps 0", "steps: got 0"),
        ("search bert --widths 4", "unknown option '--widths'"),
        ("convert bert --kernel auto --search-swaps 4", "unknown option '--search-swaps'"),
        ("convert bert --kernel auto --plot p.png", "unknown option '--plot'"),
        ("convert bert --kernel auto --layers 0=elu", "--layers: --kernel auto chooses kernel and arguments"),
        ("convert bert --kernel auto --window 4", "--window: --kernel auto chooses kernel and arguments"),
        ("convert bert --kernel auto --kernel-arg a=1", "--kernel-arg: --kernel auto chooses kernel and arguments"),
        ("convert bert --kernel auto --candidates hedgehog", "got one candidate"),
        ("convert bert --kernel auto --dry-run --candidates hedgehog,elo", "unknown kernel 'elo'"),
        (
            "convert bert --kernel auto --dry-run --candidates hedgehog,t2r --budget cost=0.01 --align-steps 0",
            "the smallest possible is --budget cost=0.1",
        ),
        ("convert bert --budget cost=0.5", "--budget: nothing is searched without --kernel auto"),
        ("convert bert --plan-out plan.yaml", "--plan-out: nothing is searched without --kernel auto"),
        ("convert bert --plan plan.yaml --layers 0=elu", "--layers: --plan FILE already determines every layer"),
        ("convert bert --plan plan.yaml --kernel auto", "--kernel: --plan FILE already determines every layer"),
        ("convert bert --plan nowhere.yaml", "'nowhere.yaml' cannot be read"),
        ("convert bert --plan texts.jsonl", "'texts.jsonl' "),
    ],
)
def test_bad_input_is_one_line(line, words, place, capsys):
    before = sorted(os.listdir(place))
    code, out, err = run(capsys, *line.split(), *DATA)
    assert (code, out.count("Traceback")) == (2, 0), out + err
    last = err.strip().splitlines()[-1]
    assert last.startswith("linearize: error: ") and words in last
    assert sorted(os.listdir(place)) == before


def test_a_plan_for_another_model(place, capsys):
    make_original(place / "gpt2", "gpt2", "AutoModelForCausalLM")
    layers = [{"layer": n, "module": f"h.{n}.attn", "kernel": "elu"} for n in range(2)]
    data = {"format": 1, "architecture": "GPT2LMHeadModel", "model_type": "gpt2", "layers": layers}

    def given(**changes):
        Path("plan.yaml").write_text(yaml.safe_dump(data | changes))
        line = ("convert", "bert", "--plan", "plan.yaml", "--distill-steps", 0, "--align-steps", 0, "--device", "cpu")
        code, _, err = run(capsys, *line, "--no-native")
        return code, (err.strip().splitlines() or [""])[-1]

    code, said = given()
    assert code == 2 and "is for another model, GPT2LMHeadModel (gpt2, 2 layers), not for this BertModel" in said
    mine = [{"layer": n, "module": f"encoder.layer.{n}.attention.self", "kernel": "elu"} for n in range(2)]
    assert "not for this" in given(model_type="bert", layers=mine[:1])[1]
    assert "keeps every layer softmax" in given(model_type="bert", layers=[x | {"kernel": "softmax"} for x in mine])[1]
    assert "unknown kernel 'elo'" in given(model_type="bert", layers=[x | {"kernel": "elo"} for x in mine])[1]
    assert (
        "unknown argument of kernel elu"
        in given(model_type="bert", layers=[mine[0] | {"arguments": {"a": 1}}, mine[1]])[1]
    )
    assert "got layers [1], expected all from 0 on, in their order" in given(layers=[layers[1]])[1]
    assert "format 2, this version reads 1" in given(format=2)[1]
    assert "unknown key 'more'. Known: architecture, format, layers, model_type" in given(more=1)[1]
    said = given(layers=[layers[0] | {"arguments": {"a": [1]}}])[1]
    assert "layers[0].arguments.a: got a list, expected text or a whole number or a number or true or false" in said
    assert "takes no arguments" in given(layers=[layers[0] | {"kernel": "softmax", "window": 3}])[1]
    assert given(model_type="bert", layers=mine)[0] == 0


def test_a_plan_file_is_not_written_over(place, capsys):
    Path("plan.yaml").write_text("mine: true\n")
    code, _, err = run(capsys, "search", "bert", *DATA, "--plan-out", "plan.yaml")
    assert code == 2 and "exists; choose another file, or pass --overwrite" in err
    code, _, err = run(capsys, "search", "bert", *DATA, "--plan-out", "plan.yaml", "--overwrite")
    assert code == 2 and "is not a plan" in err and Path("plan.yaml").read_text() == "mine: true\n"
