"""Every engine that is here gives the same tokens and embeddings (`compare.py` has the table)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.native_op import native_cache  # noqa: F401
from support.scripts import script

compare = script("compare", Path(__file__).parent)


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
