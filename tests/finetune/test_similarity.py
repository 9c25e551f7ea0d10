"""Likeness of sentences by their embeddings: the numbers, and that there is nothing to tune."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from support.tasks import measured
from transformers import AutoModel, AutoTokenizer

import linearize
from linearize.cli import main
from linearize.core.errors import ConfigError
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.metrics import METRICS
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.tasks import task
from linearize.training.stage_two.trainer import finetune


@pytest.mark.parametrize("pooling", ["mean", "first", "first, converted", "last"])
def test_the_score_is_the_rank_correlation_of_cosines(loud_bert, glue, tmp_path, pooling):
    """Checkpoints that pool the first or last token were measured by the mean: the score of other embeddings."""
    tokenizer, model = AutoTokenizer.from_pretrained(loud_bert), AutoModel.from_pretrained(loud_bert).eval()
    if pooling != "mean":
        model = linearize.convert(model, "elu") if "," in pooling else model
        model.save_pretrained(tmp_path / "own")
        (tmp_path / "own" / "1_Pooling").mkdir()
        (tmp_path / "own" / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
        mode = "pooling_mode_lasttoken" if pooling == "last" else "pooling_mode_cls_token"
        (tmp_path / "own" / "1_Pooling" / "config.json").write_text(f'{{"{mode}": true}}')
        model = AutoModel.from_pretrained(tmp_path / "own").eval()
    data = prepare(task("similarity"), tokenizer, DataOptions(max_length=16), data=str(glue))
    found = measured(model, data, tmp_path)
    cosines, labels = [], []
    for row in data.validation:
        vectors = []
        for prefix in ("", "second_"):
            ids = torch.tensor([row[f"{prefix}input_ids"]])
            with torch.no_grad():
                states = model(input_ids=ids).last_hidden_state[0]
            vectors.append({"mean": states.mean(dim=0), "last": states[-1]}.get(pooling, states[0]))
        cosines.append(float(torch.cosine_similarity(*vectors, dim=0)))
        labels.append(row["labels"])
    for name in ("spearman", "pearson"):
        expected = METRICS[name](cosines, np.array(labels))[name]
        assert found[name] == pytest.approx(expected, abs=1e-5)


def test_what_the_measured_embedding_leaves_out_is_said(bert, glue, tmp_path, capsys):
    """Dense modules and prompts were left out without a word."""
    shutil.copytree(bert, tmp_path / "own")
    modules = [{"path": "", "type": "st.Transformer"}, {"path": "1_Pooling", "type": "st.Pooling"}]
    (tmp_path / "own" / "modules.json").write_text(json.dumps([*modules, {"path": "2_Dense", "type": "st.Dense"}]))
    (tmp_path / "own" / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: ", "document": ""}}')
    line = ["evaluate", str(tmp_path / "own"), "--task", "similarity", "--dataset", str(glue), "--max-length", "16"]
    assert main([*line, "--device", "cpu"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "(mean); left out, unlike in SentenceTransformer: module '2_Dense', prompt 'query'." in said


def test_there_is_nothing_to_tune(bert, glue, tmp_path):
    data = prepare(task("similarity"), AutoTokenizer.from_pretrained(bert), data=str(glue))
    with pytest.raises(ConfigError, match="nothing to train"):
        finetune(AutoModel.from_pretrained(bert), data, TuneConfig(steps=1), folder=tmp_path)


def test_from_the_command_line(bert, glue, capsys):
    line = ["evaluate", bert, "--task", "similarity", "--dataset", str(glue), "--compare", bert, "--max-length", "16"]
    assert main([*line, "--device", "cpu"]) == 0
    assert "spearman" in capsys.readouterr().out
