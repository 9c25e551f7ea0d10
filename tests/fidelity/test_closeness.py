"""The script that compares converted encoders with softmax by length."""

import json

import pytest
from support.scripts import script
from support.tiny import converted, original
from transformers import BertTokenizer

import linearize
from linearize.core.errors import ConfigError


def test_a_conversion_is_compared_with_softmax_at_its_positions(tmp_path, capsys):
    softmax = original("bert")
    letters = [f"w{number}" for number in range(90)]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(names)})
    softmax.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    linearize.save(converted("bert", window=4), tmp_path / "near", processor=tokenizer)
    linearize.save(converted("bert", window=64), tmp_path / "all", processor=tokenizer)
    (tmp_path / "text.txt").write_text(" ".join(letters))
    line = [str(tmp_path / "bert"), "--converted", f"near={tmp_path / 'near'}", f"all={tmp_path / 'all'}"]
    line += ["--text", str(tmp_path / "text.txt"), "--rows", "2", "--output", str(tmp_path / "out.json")]
    script("closeness_by_length").main([*line, "--lengths", "12", "30"])
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(one["tokens"], one["row"]) for one in found] == [(12, "near"), (12, "all"), (30, "near"), (30, "all")]
    for near, whole in (found[:2], found[2:]):
        # A window that holds the row is softmax itself.
        assert whole["error"] < 1e-5 and whole["cosine"] == pytest.approx(1) == whole["pooled_cosine"]
        assert near["error"] > 1e-3 and near["cosine"] < 1
    with pytest.raises(SystemExit):
        script("closeness_by_length").parse([*line, "--converted", "near"])
    assert "converted: got 'near', expected NAME=DIR" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="expected a file in an existing folder"):
        script("closeness_by_length").parse([*line, "--output", str(tmp_path / "nowhere" / "out.json")])
    with pytest.raises(SystemExit, match="got 1 rows of 60 tokens, expected 2; add text"):
        script("closeness_by_length").main([*line, "--lengths", "60"])


def test_state_choice_refuses_an_output_without_a_folder_before_the_first_run(tmp_path):
    with pytest.raises(ConfigError, match="expected a file in an existing folder"):
        script("state_choice").parse(["bert", "--data", "glue", "--output", str(tmp_path / "nowhere" / "out.json")])
