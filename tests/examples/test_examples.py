"""The stories of `examples/`, on tiny models."""

import json

import pytest
from support.checkpoints import WORDS, make_original
from support.documents import CHECKOUT, RECIPES, make_cheap, write_glue
from support.scripts import script

from linearize.checkpoint.provenance import read_log

# docs/command-line.md runs all of them in `make test`.
pytestmark = pytest.mark.slow


def example(name):
    return script(name, CHECKOUT / "examples")


def test_an_engineer_with_long_documents(tmp_path, capsys):
    model = make_original(tmp_path / "bert")
    rows = [{"body": " ".join(WORDS * 4 + WORDS[i % 9 :]), "outcome": ("bad", "good")[i % 2]} for i in range(48)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    columns = ["--text", "body", "--label", "outcome", "--max-length", "80"]
    few = ["--distill-steps", "1", "--align-steps", "1", "--epochs", "0.2"]
    output = tmp_path / "out"
    result = example("long_documents").main([str(model), str(data), *columns, *few, "--output", str(output)])
    out = capsys.readouterr().out
    assert [side.max_length for side in result.sides] == [64, 64, 64, 80] and result.longest_row > 80
    assert result.verdict in out and all(f"{side.score:6.1f}" in out for side in result.sides)
    assert out.splitlines()[-1].startswith("[{'label': '") and (output / "linear" / "config.json").is_file()


def test_a_researcher_with_a_kernel(tmp_path, monkeypatch, capsys):
    make_cheap(monkeypatch, tmp_path)
    model = make_original(tmp_path / "bert", head="AutoModelForMaskedLM")
    write_glue(tmp_path / "glue", [{"text": " ".join(WORDS[i % 9 :]), "label": i % 2} for i in range(32)])
    few = [change for change in RECIPES["minilm-glue"] if not change.startswith(("tasks", "model", "seeds"))]
    table = example("own_kernel").main([
        str(model), str(tmp_path / "glue"), "--kernels", "softmax,squared_relu", "--seeds", "0,1", *few,
        "--output", str(tmp_path / "run"),
    ])  # fmt: skip
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    assert lines[0] == "|  | cola |" and [line.split("|")[1].strip() for line in lines[2:]] == [
        "softmax", "squared\\_relu", "chance"
    ]  # fmt: skip
    results = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert len(results) == 4 and "4 of 4" in capsys.readouterr().out


def test_a_person_from_language_models(tmp_path):
    model = make_original(tmp_path / "gpt2", "gpt2", "AutoModelForCausalLM")
    data = tmp_path / "corpus.txt"
    data.write_text("\n".join(" ".join(WORDS[i % 9 :] + WORDS[: i % 5] + WORDS[: i % 3]) for i in range(200)))
    arguments = ["--prompt", "the cat sat", "--tokens", "8", "--dataset", str(data), "--distill-steps", "2"]
    text = example("generation").main([str(model), *arguments, "--output", str(tmp_path / "out")])
    assert text.startswith("the cat sat")


def test_a_person_from_vision(tmp_path):
    arguments = ["test_vit", "--untrained", "--distill-steps", "1", "--output", str(tmp_path / "out")]
    answers = example("images").main(arguments)
    assert len(answers) == 3 and all("score" in answer for answer in answers)
    assert [line["stage"] for line in read_log(tmp_path / "out")] == ["distillation"]
