"""Every verb has --json: one JSON document on stdout and nothing else there; what people read goes to stderr."""

import json

import pytest
from support.checkpoints import make_embedder, make_original, make_text, texts

from linearize.cli import main
from linearize.cli.main import VERBS, build_parser
from linearize.jobs.export import ExportResult

STAGE_ONE = "--dataset texts.jsonl --text-column text --distill-steps 1 --holdout 4 --batch-size 4 --device cpu"
ALIGN = "--dataset texts.jsonl --text-column text --steps 2 --holdout 4 --batch-size 4 --device cpu"
TASK = "--task text-classification --dataset texts.jsonl --columns text --max-length 16 --batch-size 8 --device cpu"
LOOK = "--dataset texts.jsonl --text-column text --inputs 2 --max-length 16 --lengths none --device cpu"
# Verb -> what is typed behind it, and keys that the document has (of its first entry, where it is a list).
CASES = {
    "convert": (f"bert {STAGE_ONE} --output a", {"plan", "distillation", "parameters_added", "findings"}),
    "search": (
        "bert --dataset texts.jsonl --text-column text --steps 1 --candidates hedgehog,elu --length 16 "
        "--holdout 4 --batch-size 4 --device cpu",
        {"plan", "layers", "points", "limit"},
    ),
    "distill": (f"linear {STAGE_ONE} --output b", {"plan", "distillation", "parameters_added", "findings"}),
    "align": (f"linear {ALIGN} --output b2", {"output", "data", "alignment", "findings"}),
    "finetune": (f"linear {TASK} --steps 1 --output c", {"metrics", "score", "interval", "best_step", "findings"}),
    "evaluate": (f"classifier {TASK}", {"figures", "score", "facts"}),
    "longdoc": (
        "bert --task text-classification --dataset texts.jsonl --columns text --max-length 72 --distill-steps 1 "
        "--align-steps 1 --steps 1 --batch-size 8 --no-memory --device cpu --output h",
        {"sides", "differences", "verdict"},
    ),
    "init": ("config.json --kernel elu --output d", {"output", "plan"}),
    "run": ("recipe.yaml --output runs/one", {"cell", "score", "metrics"}),
    "recipes": ("", {"name", "summary", "cells"}),
    "results": ("runs/made", {"title", "rows", "columns"}),
    "kernels": ("", {"name", "formula", "arguments", "quality", "speed", "choose"}),
    "inspect": ("linear", {"converted", "plan", "provenance"}),
    "embed": (
        "embedder --dataset texts.jsonl --spans 8 --output vectors.npy --device cpu",
        {"output", "documents", "spans", "size", "tokens", "cut"},
    ),
    "export": ("linear --output i", {"output", "graphs", "checked"}),
    "push": ("linear alice/linear", {"url"}),
    "report": (f"linear {LOOK} --output e", {"checkpoint", "fidelity", "left_out"}),
    "compare": (f"linear linear2 {LOOK} --output f", {"conversions", "notes"}),
    "demo": ("--steps 1 --tokens 512 --output g", {"conversion", "comparison"}),
    "completion": ("bash", {"shell", "script"}),
    "native": ("", {"library", "built", "used", "agreement"}),
    "bench": ("--device cpu --lengths 16 --heads 2 --head-dim 8 --repeats 1 --no-memory", {"machine", "rows"}),
}
RECIPE = """summary: tiny
flow: scratch
kernels: [softmax]
tasks:
  recall: {make: associative-recall, options: {train: 16, validation: 8, vocabulary: 6, length: 8}}
model:
  pretrained: false
  config: {model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 2}
rows: {max_length: 8}
finetune: {batch_size: 8, steps: 1}
device: cpu
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("json")
    texts(root, 48)
    make_original(root / "bert")
    make_original(root / "classifier", head="AutoModelForSequenceClassification")
    for name in ("linear", "linear2"):
        make_text(root / name)
    make_embedder(root / "embedder")
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20}
    (root / "config.json").write_text(json.dumps(config))
    (root / "recipe.yaml").write_text(RECIPE)
    assert main(["run", str(root / "recipe.yaml"), "--output", str(root / "runs" / "made")]) == 0
    return root


def test_every_verb_has_a_case():
    assert set(CASES) == set(VERBS)


@pytest.mark.parametrize("verb", CASES)
def test_json(verb, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    # Of the demo only the checkpoint is another one, and memory takes fresh processes; an upload needs a Hub; writing a
    # graph down takes seconds (tests/export does).
    monkeypatch.setattr("linearize.jobs.export.export_checkpoint", lambda *_: ExportResult("i", {}, {}))
    monkeypatch.setattr("linearize.jobs.demo.minilm_folder", lambda: place / "bert")
    monkeypatch.setattr("linearize.evaluation.bench.memory.in_fresh_process", lambda *_: 1)
    monkeypatch.setattr("linearize.checkpoint.push.push", lambda *_, **__: "https://example.org")
    words, keys = CASES[verb]
    assert "--json" in build_parser(verb).format_help()
    capsys.readouterr()
    code = main([verb, *words.split(), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    found = json.loads(out)
    assert keys <= set(found[0] if isinstance(found, list) else found)


@pytest.mark.parametrize("verb", CASES)
def test_an_error_leaves_stdout_empty(verb, capsys):
    assert main([verb, "--jsno"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Did you mean --json" in err


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False)])
def test_of_several_processes_the_first_speaks(rank, speaks, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    for words in (["kernels"], ["kernels", "--json"]):
        assert main(words) == 0
        assert bool(capsys.readouterr().out) == speaks


def test_an_evaluation_without_a_part_is_a_side_of_its_own(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    make_text("masked", head="AutoModelForMaskedLM")
    words = TASK.replace("text-classification", "masked-lm").split()
    assert main(["evaluate", "masked", *words, "--ablate", "attention", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ours, without = found["sides"]
    assert ours["score"] == found["score"] != without["score"] and "without its attention" in without["name"]
    # With an original the table has times too, but none of this side; it was a traceback after all measurements.
    make_original(place / "masked-original", head="AutoModelForMaskedLM")
    compared = ["--compare", "masked-original", "--ablate", "attention"]
    assert main(["evaluate", "masked", *words, *compared]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "without its" in line and "│" in line)
    assert [cell.strip() for cell in line.split("│")][-2] == "-"
