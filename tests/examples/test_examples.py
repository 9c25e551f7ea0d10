"""The worked examples, on tiny models."""

import json

import torch
from support.checkpoints import WORDS, make_original

from linearize.checkpoint.log import read_log
from linearize.examples import classification, generation, images, long_documents


def test_classification(tmp_path, capsys):
    model = make_original(tmp_path / "roberta", "roberta", max_position_embeddings=140)
    rows = [{"text": " ".join(WORDS[i % 9 :]), "label": ("bad", "good")[i % 2]} for i in range(48)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    figures = classification.main([str(model), str(data), "--distill-steps", "2", "--output", str(tmp_path / "out")])
    assert 0 <= figures["accuracy"] <= 100
    assert "score" in capsys.readouterr().out


def test_long_documents(tmp_path, capsys):
    model = make_original(tmp_path / "bert")
    document = tmp_path / "book.txt"
    document.write_text(" ".join(WORDS * 20))
    arguments = [
        str(model),
        str(document),
        "--tokens",
        "300",
        "--distill-steps",
        "2",
        "--output",
        str(tmp_path / "out"),
    ]
    vector = long_documents.main(arguments)
    assert vector.shape == (32,) and bool(torch.isfinite(vector).all())
    assert "300 tokens" in capsys.readouterr().out


def test_generation(tmp_path):
    model = make_original(tmp_path / "gpt2", "gpt2", "AutoModelForCausalLM")
    data = tmp_path / "corpus.txt"
    data.write_text("\n".join(" ".join(WORDS[i % 9 :] + WORDS[: i % 5] + WORDS[: i % 3]) for i in range(200)))
    arguments = ["--prompt", "the cat sat", "--tokens", "8", "--dataset", str(data), "--distill-steps", "2"]
    text = generation.main([str(model), *arguments, "--output", str(tmp_path / "out")])
    assert text.startswith("the cat sat")


def test_images(tmp_path):
    answers = images.main(["test_vit", "--untrained", "--distill-steps", "1", "--output", str(tmp_path / "out")])
    assert len(answers) == 3 and all("score" in answer for answer in answers)
    assert [line["stage"] for line in read_log(tmp_path / "out")] == ["distillation"]
