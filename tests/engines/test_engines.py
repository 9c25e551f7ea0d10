"""Every engine that is here gives the same tokens and embeddings (`compare.py` has the table)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

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


class Writer:
    """An engine whose next token follows from all tokens before it."""

    def __init__(self):
        group = SimpleNamespace(layer_names=["0"], kv_cache_spec=SimpleNamespace(page_size_bytes=2**20))
        cache = SimpleNamespace(kv_cache_groups=[group], num_blocks=9)
        scheduler = SimpleNamespace(kv_cache_config=cache, kv_cache_manager=SimpleNamespace(usage=0.5))
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        self.requests, self.aborted = {}, []

    def add_request(self, name, prompt, options):
        self.requests[name] = (prompt["prompt_token_ids"], [], options.max_tokens)

    def abort_request(self, names):
        self.aborted += [self.requests.pop(name) and name for name in names]

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        outputs = []
        for name, (prompt, new, most) in list(self.requests.items()):
            new.append(following(prompt + new))
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=list(new))]))
            if len(new) == most:
                del self.requests[name]
        return outputs


def following(tokens):
    return sum(place * token for place, token in enumerate(tokens, 1)) % 97


@pytest.mark.parametrize("known", [[], [3, 0, 11], [11, 11, 11]])
def test_the_script_for_vllm_continues_after_the_tokens_it_has(known, monkeypatch):
    vllm = SimpleNamespace(SamplingParams=lambda **options: SimpleNamespace(**options))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    prompts, expected = [[5, 7, 9], [3], [8, 1]], []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(11):
            text.append(following(text))
        expected.append(text[len(prompt) :])
    answers = [answer[:count] for answer, count in zip(expected, known or [0] * 3, strict=True)]
    begun, kept = [list(answer) for answer in answers], []
    equality.run(Writer(), prompts, answers, 11, minutes=0, keep=lambda: kept.append(True))
    assert answers == begun and kept
    engine = Writer()
    equality.run(engine, prompts, answers, 11)
    assert answers == expected and not engine.requests
    assert engine.aborted == ["aborted"]


def greedy(folder, tokens):
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        return int(model(torch.tensor([tokens])).logits[0, -1].argmax())
