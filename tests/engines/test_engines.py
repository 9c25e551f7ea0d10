"""Every engine that is here gives the same tokens and embeddings (`compare.py` has the table)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.native_op import native_cache  # noqa: F401
from support.scripts import script
from support.tiny import converted
from transformers import AutoModelForCausalLM

compare = script("compare", Path(__file__).parent)
equality = script("vllm_equality")


@pytest.mark.slow
def test_all_engines_agree(tmp_path, monkeypatch, native_cache):  # noqa: F811
    pytest.importorskip("onnxscript")
    monkeypatch.setenv("XDG_CACHE_HOME", str(native_cache))
    table = compare.compare(tmp_path)
    wrong = {(engine, name): one for engine, row in table.items() for name, one in row.items() if one.wrong}
    assert not wrong, wrong
    ran = {engine for engine, row in table.items() if not any(one.skipped for one in row.values())}
    assert ran >= {"explicit weights", "PyTorch", "ONNX", "remote code"}, table
    assert not any(table[engine]["all additions"].skipped for engine in ("native op", "ONNX, own op")), table
    # Without an environment for vLLM the table says how to install it.
    texts = compare.MODELS.keys() - {"vision"} if compare.VLLM.exists() else set()
    assert {name for name, one in table["vLLM"].items() if not one.skipped} == texts, table["vLLM"]
    for name in compare.MODELS:
        assert table["PyTorch"][name].difference is not None


def test_another_token_and_another_number_are_found(tmp_path, monkeypatch):
    """A check that could not fail would show nothing."""
    names = ("softmax heads", "vision")
    monkeypatch.setattr(compare, "MODELS", {name: compare.MODELS[name] for name in names})
    writer, reader = compare.make_cases(tmp_path)
    for case in (writer, reader):
        right = compare.run_pytorch([case], tmp_path)[case.name]
        judge = compare.Judge(case, right)
        assert not judge(right).wrong
        moved = right.values.clone()
        moved[3, -1, 0] += 3 * judge(right).bound
        assert judge(compare.Found(moved, right.tokens)).wrong == [3]
    found = compare.run_pytorch([writer], tmp_path)[writer.name]
    tokens = found.tokens.clone()
    tokens[2, -1] = found.values[2, -1].argmin()
    judged = compare.Judge(writer, found)(compare.Found(tokens=tokens))
    assert (judged.wrong, judged.equal, judged.difference) == ([2], compare.ROWS - 1, None)
    assert torch.equal(found.tokens, found.values.argmax(-1))


def test_the_script_for_vllm_finds_another_token(tmp_path):
    converted("llama", "AutoModelForCausalLM", window=4).save_pretrained(tmp_path)
    prompts, right = [[5, 7, 9], [3]], {"equal": 12, "largest difference of logits": 0.0}
    answers = []
    for prompt in prompts:
        found = prompt
        for _ in range(6):
            found = [*found, greedy(tmp_path, found)]
        answers.append(found[len(prompt) :])
    assert equality.check(str(tmp_path), prompts, answers, True) == right | {"first tokens as generate's": 6}
    answers[0][4] = (answers[0][4] + 1) % 99
    found = equality.check(str(tmp_path), prompts, answers, True)
    assert found["equal"] < 12 and found["largest difference of logits"] > equality.NEAR_TIE
    assert found["first tokens as generate's"] == 4


def greedy(folder, tokens):
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        return int(model(torch.tensor([tokens])).logits[0, -1].argmax())
