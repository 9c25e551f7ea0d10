"""The verb `align`, and the alignment inside `convert`: what is written, what is refused before any work."""

from __future__ import annotations

import json

import pytest
import torch
from support.checkpoints import make_original, texts
from support.pictures import cheap_pictures
from transformers import AutoModel, AutoTokenizer

from linearize.cli import main
from linearize.training.alignment.trainer import AlignTrainer

DATA = ["--dataset", "texts.jsonl", "--text-column", "text", "--holdout", "4", "--batch-size", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("align")
    texts(root, 48)
    make_original(root / "bert")
    model = AutoModel.from_pretrained(root / "bert")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Attention then counts for much, as a trained model's does.
            parameter.mul_(8 if parameter.ndim == 2 and "embed" not in name else 1)
    model.save_pretrained(root / "bert")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main(["convert", "bert", *DATA, "--distill-steps", "2", "--align-steps", "0", "--output", "plain"]) == 0
        assert main(["convert", "bert", *DATA, "--distill-steps", "5", "--output", "aligned"]) == 0
    return root


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def facts(folder):
    return json.loads((folder / "config.json").read_text())["linearize"]["provenance"]


def stages(folder):
    return [json.loads(line)["stage"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_convert_aligns_two_fifths_as_long_and_says_so(here):
    assert "alignment" not in facts(here / "plain")
    found = facts(here / "aligned")["alignment"]
    assert (found["steps"], found["train"]) == (2, "blocks")
    assert found["after"]["loss"] <= found["before"]["loss"]
    assert stages(here / "aligned") == ["distillation"] * 5 + ["alignment"] * 2


def test_align_writes_a_checkpoint_that_loads(here, tmp_path, capsys):
    out = tmp_path / "out"
    line = ["align", "plain", "--teacher", "bert", *DATA, "--steps", "8", "--eval-every", "2", "--output", str(out)]
    assert main(line) == 0
    text = capsys.readouterr().out
    assert "Whole model against its original" in text and "pooled output" in text
    found = facts(out)["alignment"]
    assert found["teacher"] == "bert" and found["after"]["loss"] < found["before"]["loss"]
    assert stages(out) == ["distillation"] * 2 + ["alignment"] * 8
    before, after = (AutoModel.from_pretrained(folder).state_dict() for folder in (here / "plain", out))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith("encoder.layer.") for name in changed)
    assert str(here) not in (out / "config.json").read_text()


def test_a_classifier_that_decodes_gets_its_tokenizers_padding(here, tmp_path):
    """GPT-2's head reads the last token before the padding: a ValueError of transformers for a batch of two."""
    make_original(tmp_path / "gpt2", "gpt2", "AutoModelForSequenceClassification")
    config = json.loads((tmp_path / "gpt2" / "config.json").read_text())
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    steps = ["--distill-steps", "1", "--align-steps", "1"]
    assert main(["convert", str(tmp_path / "gpt2"), *DATA, *steps, "--output", str(tmp_path / "out")]) == 0
    padding = AutoTokenizer.from_pretrained(tmp_path / "gpt2").pad_token_id
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] == padding is not None
    line = ["align", str(tmp_path / "out"), "--teacher", str(tmp_path / "gpt2"), *DATA, "--steps", "1"]
    assert main([*line, "--output", str(tmp_path / "again")]) == 0


def test_an_interrupted_alignment_goes_on(here, tmp_path, capsys, monkeypatch):
    line = ["align", "plain", *DATA, "--steps", "6", "--save-every", "2"]
    assert main([*line, "--output", str(tmp_path / "whole")]) == 0
    real = AlignTrainer.training_step

    def cut(self, *given):
        if self.phase == "end to end" and self.state.global_step == 1:
            raise KeyboardInterrupt
        return real(self, *given)

    monkeypatch.setattr(AlignTrainer, "training_step", cut)
    assert main([*line, "--output", str(tmp_path / "cut")]) == 130
    assert "cut.align" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert main([*line, "--output", str(tmp_path / "cut"), "--resume"]) == 0
    assert not (tmp_path / "cut.align").exists()
    one, two = (AutoModel.from_pretrained(tmp_path / name) for name in ("whole", "cut"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_what_is_said_of_an_aligned_checkpoint(here, tmp_path, capsys, monkeypatch):
    cheap_pictures(monkeypatch)
    assert main(["inspect", "aligned"]) == 0
    assert "pooled cosine" in capsys.readouterr().out
    assert "2 steps with its own softmax, trained: blocks" in (here / "aligned" / "README.md").read_text()
    look = ["--dataset", "texts.jsonl", "--text-column", "text", "--inputs", "2", "--max-length", "16"]
    for name, noted in (("aligned", True), ("plain", False)):
        line = ["report", name, *look, "--lengths", "none", "--device", "cpu", "--output", str(tmp_path / name)]
        assert main(line) == 0
        page = (tmp_path / name / "index.html").read_text()
        assert ("no longer the original" in page) is noted


def test_divergence_inside_convert_keeps_what_stage_one_learned(here, tmp_path, capsys):
    line = ["convert", "bert", *DATA, "--distill-steps", "2", "--align-steps", "4", "--output", str(tmp_path / "out")]
    wild = ["--align-learning-rate", "1e5", "--align-kernel-learning-rate", "1e5", "--align-patience", "0"]
    code = main([*line, *wild, "--align-warmup", "0", "--align-blockwise", "0", "--align-eval-every", "1"])
    err = capsys.readouterr().err
    if code == 0:
        assert facts(tmp_path / "out")["alignment"]["best_step"] == 0
    else:
        assert code == 2 and err.count("\n") == 1 and "holds that state" in err
    AutoModel.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    "line, words",
    [
        (["align", "aligned"], "its own softmax is no longer the original's"),
        (["align", "plain", "--teacher", "plain"], "is itself converted"),
        (["align", "plain", "--teacher", "roberta"], "expected 'bert'"),
        (["align", "plain", "--teacher", "others"], "tokenizer"),
        (["align", "bert"], "is not a converted checkpoint"),
        (["align", "plain", "--train", "everything"], "expected one of kernels, attention, blocks, lora"),
        (["align", "plain", "--stepz", "3"], "Did you mean --steps"),
        (["align", "plain", "--holdout", "0"], "no held-out batch"),
        (["distill", "aligned"], "linearize align aligned --teacher"),
    ],
)
def test_bad_input_is_one_line(here, tmp_path, capsys, line, words):
    if "roberta" in line and not (here / "roberta").exists():
        make_original(here / "roberta", name="roberta")
    if "others" in line and not (here / "others").exists():
        make_original(here / "others")
        file = here / "others" / "tokenizer.json"
        content = json.loads(file.read_text())
        pieces = content["model"]["vocab"]
        first, second = sorted(pieces)[-2:]
        pieces[first], pieces[second] = pieces[second], pieces[first]
        file.write_text(json.dumps(content))
    capsys.readouterr()
    data = [] if "--holdout" in line else DATA
    extra = ["--dataset", "texts.jsonl", "--text-column", "text", "--device", "cpu"] if "--holdout" in line else []
    assert main([*line, *data, *extra, "--output", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err.strip()
    assert words in err and "\n" not in err
    assert not (tmp_path / "out").exists()
