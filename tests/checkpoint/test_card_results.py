"""The card: a loading line that runs, limits, results next to the original's, and the commands that made it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shlex
import sys
import warnings

import pytest
import yaml
from markdown_it import MarkdownIt
from support.checkpoints import make_original, texts
from support.tiny import converted, original
from transformers import AutoModel

import linearize
from linearize.checkpoint.inspect import inspect_checkpoint
from linearize.checkpoint.provenance import Provenance
from linearize.checkpoint.push import _name_card, with_name
from linearize.checkpoint.save import limits, model_card
from linearize.cli import main
from linearize.cli.main import build_parser
from linearize.core import registry
from linearize.core.errors import ConfigError
from linearize.core.registry import kernel_info
from linearize.modeling.plan import Plan

read = Provenance
DATA = "--dataset texts.jsonl --text-column text --holdout 8 --batch-size 4 --device cpu"
TASK = "--task text-classification --dataset texts.jsonl --columns text --max-length 16 --batch-size 8 --device cpu"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An original, tuned; converted, aligned, and tuned with it as the teacher."""
    root = tmp_path_factory.mktemp("cards")
    texts(root, 96)
    make_original(root / "bert")
    lines = [
        f"finetune bert {TASK} --steps 2 --output tuned",
        f"convert tuned {DATA} --distill-steps 2 --align-steps 0 --max-length 128 --keep-softmax 1 --output linear",
        f"align linear {DATA} --steps 2 --output aligned",
        f"finetune aligned {TASK} --steps 2 --teacher tuned --output done",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for line in lines:
            assert main(line.split()) == 0, line
    return root


@pytest.fixture
def card(place):
    return (place / "done" / "README.md").read_text()


@pytest.mark.parametrize(
    "line", [f"align done {DATA} --teacher tuned --length 16 --steps 2", f"distill half {DATA} --distill-steps 2"]
)
def test_a_later_stage_does_not_keep_the_scores_of_other_weights(place, tmp_path, monkeypatch, line):
    """The card of a model that was aligned after its tuning had the accuracy from before."""
    monkeypatch.chdir(place)
    if not (place / "half").exists():
        assert main(f"finetune linear {TASK} --steps 2 --output half".split()) == 0
    assert main([*line.split(), "--output", str(tmp_path / "later")]) == 0
    card = (tmp_path / "later" / "README.md").read_text()
    assert "model-index" not in card and "accuracy" not in card and "2 steps" in card
    made = inspect_checkpoint(str(tmp_path / "later")).provenance
    assert made.weights_were_trained and made.part("finetuning").whole("max_length") == 16


def front(text):
    return yaml.safe_load(text.split("\n---\n")[0].removeprefix("---"))


def test_the_loading_lines_run(place, card, monkeypatch):
    monkeypatch.chdir(place)
    block = re.search(r"## Load\n\n```python\n(.*?)```", card, re.DOTALL)[1]
    names = {}
    exec(block, names)
    assert type(names["model"]).__qualname__ == "LinearizedBertForSequenceClassification"
    assert 'from_pretrained("done")' in block


def test_results_stand_beside_the_originals(place, card):
    ours = json.loads((place / "done" / "finetuning.json").read_text())
    theirs = json.loads((place / "tuned" / "finetuning.json").read_text())
    assert ours["original"] == {name: theirs[name] for name in ("score", "metrics", "max_length")}
    accuracy = f"| accuracy | {ours['metrics']['accuracy']:.4g} | {theirs['metrics']['accuracy']:.4g} |"
    assert accuracy in card and "| metric | this model | the original, tuned for the same task |" in card
    level = "" if ours["above_chance"] else " This model is not better than that."
    assert f"ignores the input, scores {ours['chance']:.4g}.{level}\n" in card
    (entry,) = front(card)["model-index"]
    found = {one["metrics"][0]["type"]: one["metrics"][0]["value"] for one in [entry["results"][0]]}
    assert entry["name"] == "done" and found["accuracy"] == ours["metrics"]["accuracy"]
    assert entry["results"][0]["task"]["type"] == "text-classification"
    assert entry["results"][0]["dataset"]["name"] == "texts.jsonl"


def test_the_commands_that_made_it_are_there(place, card):
    said = [line.strip() for line in card.partition("## How it was made\n")[2].partition("## ")[0].splitlines() if line]
    assert [shlex.split(line)[1] for line in said] == ["convert", "align", "finetune"]
    for line in said:
        words = shlex.split(line)
        build_parser(words[1]).parse_args(words[2:])
    assert said[0].startswith("linearize convert tuned ")
    given = "--keep-softmax 1 --max-length 128 --distill-steps 2 --align-steps 0"
    options = f"--dataset texts.jsonl --text-column text --batch-size 4 --holdout 8 {given}"
    assert sorted(said[0].split()[3:]) == sorted(options.split())
    assert "--teacher tuned" in said[2] and str(place) not in card


def test_limits(place, card):
    said = card.partition("## Limits\n")[2].partition("## ")[0]
    assert "It takes 128 tokens; it was trained on rows of up to 31." in said
    assert "1 of 2 attentions are still softmax" in said and "Short inputs are not faster" in said
    model = converted("bert", "AutoModel", "rfa")
    plan = Plan.from_dict(model.config.linearize)
    # Stage two may have read longer rows than stage one.
    stages = {"longest_row": 28, "finetuning": {"max_length": 64, "facts": {"longest_row": 90}}}
    assert "on rows of up to 64." in " ".join(limits(plan, read(stages), 128))
    assert "on rows of up to 28." in " ".join(limits(plan, read(stages | {"finetuning": {"facts": {}}}), 128))
    # Perplexity has windows of a length, and no longest row.
    windows = {"finetuning": {"max_length": 96, "facts": {"context": 64, "stride": 63}}}
    assert "on rows of up to 96." in " ".join(limits(plan, read(stages | windows), 128))
    assert "weights can be negative" in " ".join(limits(plan, Provenance(), None))
    heads = converted("gpt2", "AutoModel", window=8, softmax_heads={0: [1]}, routed_blocks=2)
    said = " ".join(limits(Plan.from_dict(heads.config.linearize), Provenance(), None))
    assert "that are still softmax, with all their keys: 1." in said and "all keys are cached" in said


def test_a_card_without_results_says_nothing_of_them(tmp_path):
    linearize.save(converted("bert", "AutoModel"), tmp_path / 'a "name"')
    text = (tmp_path / 'a "name"' / "README.md").read_text()
    assert "## Results" not in text and "model-index" not in text and "How it was made" not in text
    assert 'from_pretrained("a \\"name\\"")' in text


@pytest.mark.parametrize(
    ("commands", "shown"),
    [("x", []), ([1], []), (["a\nb\x1b[2J"] * 30, ["a b\ufffd[2J"] * 20), (["a" * 9000], ["a" * 4000])],
)
def test_a_card_shows_a_limited_number_of_printable_commands(commands, shown):
    model = converted("bert", "AutoModel")
    model.config.linearize = {**model.config.linearize, "provenance": {"commands": commands}}
    text = model_card(model)
    assert ("## How it was made" in text) is bool(shown)
    made = text.partition("## How it was made\n")[2].partition("## ")[0]
    assert [line.strip() for line in made.splitlines() if line] == shown


def test_a_repository_gives_its_name(place, card, tmp_path):
    text = with_name(card, "alice/linear")
    assert 'from_pretrained("alice/linear")' in text and front(text)["model-index"][0]["name"] == "alice/linear"
    assert 'from_pretrained("done")' not in text
    assert with_name(text, "done") == card.replace("- name: done", '- name: "done"')
    (tmp_path / "README.md").write_text(card)
    _name_card(tmp_path, "alice/linear")
    assert (tmp_path / "README.md").read_text() == text and len(list(tmp_path.iterdir())) == 1
    _name_card(tmp_path / "nothing", "alice/linear")


OUTSIDE = """
import dataclasses, linearize
from linearize.kernels.elu import Elu

class Mine(Elu):
    pass

info = dataclasses.replace(linearize.kernel_info("elu"), name="mine", build=Mine, url="", source="ours")
linearize.register_kernel(info)
"""


def test_a_kernel_from_outside_names_its_package(tmp_path, monkeypatch, capsys):
    """Its code does not travel: one note, the card, config.json, `inspect` and the error of a load name the package."""
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))
    (tmp_path / "mykern.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mykern", raising=False)
    importlib.import_module("mykern")
    original("bert").save_pretrained(tmp_path / "bert")
    line = ["convert", str(tmp_path / "bert"), "--kernel", "mine", "--distill-steps", "0", "--align-steps", "0"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*mine")
        assert main([*line, "--output", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    cure = "kernel 'mine' of package mykern is not part of linearize, so its code does not travel with the checkpoint: "
    cure += "install mykern to load it, and import it first."
    assert f"Loading the checkpoint needs more code: {cure}" in said and said.count("not part of linearize") == 1
    section = json.loads((tmp_path / "out" / "config.json").read_text())["linearize"]
    assert section["packages"] == {"mine": "mykern"}
    text = (tmp_path / "out" / "README.md").read_text()
    assert "trust_remote_code" not in text and f"Loading it needs more code: {cure}" in text
    assert "import linearize\nimport mykern\nmodel =" in text and "]()" not in text and ". ours\n" in text
    assert "trust_remote_code=True" in model_card(converted("bert", "AutoModel"))
    assert type(AutoModel.from_pretrained(tmp_path / "out")).__qualname__ == "LinearizedBertModel"
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "needs package       mykern (kernel mine)" in capsys.readouterr().out
    with pytest.warns(UserWarning, match=cure.removesuffix(".")) as warned:
        linearize.save(AutoModel.from_pretrained(tmp_path / "out"), tmp_path / "again")
    assert len(warned) == 1
    registry._KERNELS.pop("mine")
    for load in (AutoModel.from_pretrained, inspect_checkpoint):
        with pytest.raises(ConfigError, match="needs package mykern, which registers its kernel 'mine'; install it"):
            load(tmp_path / "out")


def test_a_kernel_of_a_script_has_no_package(monkeypatch):
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))
    made = type("Mine", (kernel_info("elu").build,), {"__module__": "__main__"})
    linearize.register_kernel(dataclasses.replace(kernel_info("elu"), name="mine", build=made))
    model = converted("bert", "AutoModel", "mine")
    assert "packages" not in model.config.to_dict()["linearize"]
    assert "kernel 'mine' of a script is not part of linearize" in model_card(model)


@pytest.mark.parametrize("name", ["<script>x<!", "x\n<script>", "x\n\n<img src=q>", "a`b<i>", "| <i>", "x\n```\n<i>"])
def test_no_name_reaches_the_card_as_html(name):
    """Also for a viewer that takes the front of the card for text."""
    model = converted("bert", "AutoModelForSequenceClassification")
    tuned = {"data": f"{name}: 40 rows", "metrics": {name: 0.5}, "task": name, "original": {"metrics": {name: 0.4}}}
    provenance = {"base_model": name, "dataset": name, "finetuning": tuned, "commands": [f"linearize {name}"]}
    model.config.linearize = {**model.config.linearize, "provenance": provenance}
    card = model_card(model, facts={"license": name, "language": [name]}, name=name)

    def html(tokens):
        for token in tokens:
            assert not token.type.startswith("html"), token.content
            html(token.children or [])

    for text in (card, card.partition("\n---\n")[2]):
        html(MarkdownIt().enable("table").parse(text))
