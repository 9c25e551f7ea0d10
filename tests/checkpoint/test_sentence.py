"""Sentence embedders keep their modules: SentenceTransformer(FOLDER) of a conversion embeds as the original's did."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import yaml
from support.checkpoints import make_original, texts

from linearize.checkpoint.loading import pooling, sentence_files, with_length
from linearize.checkpoint.push import with_name
from linearize.cli import main
from linearize.core.errors import CheckpointError

sentence_transformers = pytest.importorskip("sentence_transformers")
LIST = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
DATA = ["--dataset", "texts.jsonl", "--text-column", "text", "--holdout", "4", "--batch-size", "4", "--device", "cpu"]


def embedder(folder, *, first=False):
    """A folder as sentence-transformers writes it."""
    make_original(folder)
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": first, "pooling_mode_mean_tokens": not first}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps(LIST))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16, "do_lower_case": False}))
    return folder


@pytest.mark.parametrize("first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_conversion_opens_with_its_modules(tmp_path, monkeypatch, first):
    from transformers import AutoConfig

    monkeypatch.chdir(tmp_path)
    texts(tmp_path, 24)
    embedder(tmp_path / "bert", first=first)
    width = AutoConfig.from_pretrained(tmp_path / "bert").hidden_size
    pooling = json.loads((tmp_path / "bert" / "1_Pooling" / "config.json").read_text())
    (tmp_path / "bert" / "1_Pooling" / "config.json").write_text(
        json.dumps({**pooling, "word_embedding_dimension": width})
    )
    line = ["convert", "bert", *DATA, "--distill-steps", "3", "--max-length", "100", "--output", "linear"]
    assert main(line) == 0
    opened = sentence_transformers.SentenceTransformer("linear", device="cpu")
    found = opened.encode(["alpha beta", "gamma"])
    assert np.linalg.norm(found, axis=1) == pytest.approx([1.0, 1.0], abs=1e-5)
    assert opened.max_seq_length == 100
    stored = json.loads((tmp_path / "linear" / "tokenizer.json").read_text())
    assert (stored["truncation"] or {"max_length": 100})["max_length"] == 100
    assert type(opened[0].auto_model).__qualname__ == "LinearizedBertModel"
    tokens = opened.tokenizer(["alpha beta"], return_tensors="pt")
    with torch.no_grad():
        states = opened[0].auto_model(**tokens).last_hidden_state[0]
    expected = states[0] if first else states.mean(dim=0)
    assert found[0] == pytest.approx((expected / expected.norm()).numpy(), abs=1e-5)
    card = (tmp_path / "linear" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "sentence-transformers" and front["pipeline_tag"] == "sentence-similarity"
    code = with_name(card, "./linear").partition("```python\n")[2].partition("```")[0]
    assert "AutoModel" not in code and 'SentenceTransformer("./linear")' in code
    made: dict = {}
    exec(code, made)
    np.testing.assert_array_equal(made["model"].encode(["alpha beta", "gamma"]), found)
    # A further stage keeps them.
    again = ["align", "linear", "--teacher", "bert", *DATA, "--length", "16", "--steps", "2", "--output", "aligned"]
    assert main(again) == 0
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        assert (tmp_path / "aligned" / name).read_bytes() == (tmp_path / "linear" / name).read_bytes()


def test_files_and_what_they_say(tmp_path):
    files = sentence_files(str(embedder(tmp_path / "first", first=True)))
    assert pooling(files) == ("first", []) and sorted(files)[0] == "1_Pooling/config.json"
    assert json.loads(with_length(files, 77)["sentence_bert_config.json"])["max_seq_length"] == 77
    assert with_length(files, None) == files
    assert pooling(sentence_files(str(embedder(tmp_path / "mean")))) == ("mean", [])
    make_original(tmp_path / "plain")
    assert sentence_files(str(tmp_path / "plain")) == {}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode": "lasttoken"}, ("last", [])),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, ("last", [])),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, ("mean", [])),
        ({"pooling_mode": ["cls", "mean"]}, ("mean", ["pooling 'cls, mean'"])),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, ("mean", ["pooling 'max'"])),
    ],
)
def test_poolings_in_both_spellings(config, expected):
    assert (
        pooling({"modules.json": json.dumps(LIST).encode(), "1_Pooling/config.json": json.dumps(config).encode()})
        == expected
    )


def test_lists_that_lead_astray_are_refused(tmp_path):
    folder = embedder(tmp_path / "bert")
    (folder / "modules.json").write_text(json.dumps([{"path": "../elsewhere"}]))
    with pytest.raises(CheckpointError, match="a folder inside the checkpoint"):
        sentence_files(str(folder))
    (folder / "modules.json").write_text("[{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        sentence_files(str(folder))
    (folder / "modules.json").write_text(json.dumps([{"path": "2_Dense"}]))
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="as a pickle"):
        sentence_files(str(folder))
