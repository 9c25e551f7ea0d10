"""The script that proves hybrids on a language model: its measures on cases with a known answer, and all of it once."""

from __future__ import annotations

import json
import math

import pytest
import torch
from support.checkpoints import WORDS, tokenizer
from support.scripts import script
from support.tiny import converted, original, stir

import linearize
from linearize.attention.interface import linear_attentions
from linearize.fidelity.ablate import ablated

proof = script("proof_smollm2")
SIZE = 40
"""Tokens of the made-up vocabulary."""


class LookUp:
    """A model that knows one rule: after a token comes what came after it the last time, within `reach` tokens."""

    device = torch.device("cpu")

    def __init__(self, reach: int) -> None:
        self.reach = reach

    def __call__(self, ids, use_cache, logits_to_keep):
        row = ids[0].tolist()
        scores = torch.zeros(len(row), SIZE)
        for place in range(len(row)):
            before = [i for i in range(max(0, place - self.reach), place) if row[i] == row[place]]
            if before:
                scores[place, row[before[-1] + 1]] = 20.0
        return type("Output", (), {"logits": scores[None, -logits_to_keep or 0 :]})


class Digits:
    """A tokenizer of ten digits and the words of the needles."""

    words = ("The", "secret", "number", "of", "the", "is", ".", *proof.NAMES)

    def __call__(self, text, add_special_tokens):
        pieces = text.split()
        ids = [[int(c) for c in x] if x.isdigit() else [10 + self.words.index(x)] for x in pieces]
        return {"input_ids": [i for of in ids for i in of]}


def test_look_up_copies_what_it_reaches():
    passages = torch.arange(36).view(2, 18)
    assert proof.copying(LookUp(99), passages) == {"share": 1.0, "rows": [1.0, 1.0]}
    assert proof.copying(LookUp(17), passages)["share"] == 0.0


def test_perplexity_of_a_model_that_knows_nothing():
    rows = torch.arange(3, 3 + 300).remainder(SIZE).view(2, 150)
    found = proof.reading(LookUp(0), rows)
    assert found["perplexity"] == pytest.approx(SIZE, rel=1e-4)
    assert found["nats"] == {name: pytest.approx(math.log(SIZE)) for name in ("0-63", "64-127")}
    assert [sum(of) for of in found["blocks"]] == pytest.approx([149 * math.log(SIZE)] * 2, abs=0.01)


def test_cloze_tells_near_from_far(monkeypatch):
    monkeypatch.setattr(proof, "NEAR", 4)
    monkeypatch.setattr(proof, "FAR", 12)
    # Tokens 0 to 9 are words, all others are not.
    tokens = [f"Ġword{chr(97 + i)}" for i in range(10)] + ["."] * (SIZE - 10)
    row = [11, 1, *range(12, 26), 11, 1, 30, 31, 30, 2, 32, 30, 2, 33, 5, 6, 7, 8, 39]
    assert row.index(2) == 21
    items = proof.cloze_items(torch.tensor(row), 1, len(row), tokens, 50)
    assert [item[:3] for item in items] == [[0, 24, "near"], [0, 17, "far"]]
    for _, place, _, words in items:
        assert words[0] == row[place] and len(set(words)) == 4 and not set(words[1:]) & set(row[:place])
    # A look-up finds 2 after 30, three tokens back, and 1 after 11, sixteen tokens back.
    right = {reach: proof.reading(LookUp(reach), torch.tensor([row]), items)["right"] for reach in (3, 99)}
    assert right == {3: {"near": "1", "far": "0"}, 99: {"near": "1", "far": "1"}}
    assert len(proof.cloze_items(torch.tensor(row), 1, len(row), tokens, 1)) == 2


def test_needles(monkeypatch):
    """A look-up by one token says the digit that followed a digit, so a number with no digit twice is found."""
    ids = torch.full((400,), 30)
    drawn = iter([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]] * 4)
    monkeypatch.setattr(proof.torch, "randint", lambda *_, **__: torch.tensor(next(drawn)))
    # After "is" comes the first digit, of the last number that was told.
    assert proof.needles(LookUp(99), Digits(), ids, 60, 2, ["harbour"]) == "11"
    assert proof.needles(LookUp(3), Digits(), ids, 60, 2, ["harbour"]) == "00"
    assert proof.needles(LookUp(99), Digits(), ids, 90, 1, ["harbour", "castle"]) == "00"


def test_intervals():
    assert proof.wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert proof.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    found = proof.difference([1.0] * 10 + [0.0] * 10, [0.0] * 20)
    low, high = found["interval"]
    assert found["value"] == 0.5 and low == pytest.approx(0.3, abs=0.051) and high == pytest.approx(0.7, abs=0.051)
    assert proof.difference([1.0, 3.0], [0.0, 2.0])["interval"] == (1.0, 1.0)


def test_columns_change_a_model_and_restore_it():
    softmax = original("llama", "AutoModelForCausalLM")
    model = converted("llama", "AutoModelForCausalLM", window=4, exact_keys=2, softmax_heads="0:1", scale="linear")
    assert proof.same_weights(softmax, model) == (len(softmax.state_dict()),) * 2
    ids = torch.arange(5, 35)
    as_it_is = proof.logits(model, ids)
    with proof.column_of(model, proof.COLUMNS["window only, exact keys, softmax heads"]), torch.no_grad():
        found = proof.logits(model, ids)
    with ablated(model, "kernel"):
        torch.testing.assert_close(found, proof.logits(model, ids), rtol=0, atol=0)
    with proof.column_of(model, proof.COLUMNS["window only"]):
        hybrids = {(x.hybrid.exact_keys, x.hybrid.softmax_heads) for x in linear_attentions(model).values()}
        assert hybrids == {(0, ())} and not torch.allclose(proof.logits(model, ids), found)
    # Every layer is the last of one: all is softmax.
    with proof.column_of(model, proof.Column("recall", softmax_layers=1)):
        torch.testing.assert_close(proof.logits(model, ids), proof.logits(softmax, ids), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(proof.logits(model, ids), as_it_is, rtol=0, atol=0)


def test_all_of_it(tmp_path, monkeypatch):
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    original("llama", "AutoModelForCausalLM").save_pretrained(tmp_path / "softmax")
    words.save_pretrained(tmp_path / "softmax")
    for name, form in {"narrow": {"exact_keys": 2, "softmax_heads": "0:1"}, "window": {}}.items():
        model = linearize.convert(
            original("llama", "AutoModelForCausalLM"), "hedgehog", window=4, scale="linear", **form
        )
        linearize.save(stir(model), tmp_path / name)
    (tmp_path / "text.txt").write_text(" ".join(WORDS * 40))
    sizes = {"NEW_TOKENS": 3, "TOPICS": ("ant",), "ASKED": ("{}", "see {}"), "PASSAGE": 6, "ANSWERED": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(proof, name, value)
    folders = [f"{name}={tmp_path / name}" for name in ("narrow", "window")]
    sizes = {"rows": 4, "length": 48, "long-rows": 2, "long-length": 64, "needles": 60, "needle-rows": 2, "offset": 7}
    line = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    output = tmp_path / "proof.json"
    main = [str(tmp_path / "softmax"), "--converted", *folders, "--text", str(tmp_path / "text.txt"), *line]
    proof.main([*main, "--output", str(output)])
    found = json.loads(output.read_text())
    table = found["columns"]
    # Those whose checkpoint was not given are left out.
    assert set(table) == {
        "softmax", "window only", "kernel and window", "kernel and window, exact keys, softmax heads",
        "window only, exact keys, softmax heads", "kernel and window, one softmax layer of six",
    }  # fmt: skip
    assert {equal == count for equal, count in found["same_weights"].values()} == {True}
    # Tiny models have two layers, so none is the sixth.
    assert table["kernel and window"]["rows"] == table["kernel and window, one softmax layer of six"]["rows"]
    ids = torch.tensor(words(" ".join(WORDS * 40))["input_ids"])[7 + 128 : 7 + 128 + 4 * 48].view(4, 48)
    with torch.no_grad():
        loss = original("llama", "AutoModelForCausalLM")(ids, labels=ids).loss
    assert table["softmax"]["rows"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert table["softmax"]["generations"]["same"] == [1.0] * 8
    answers = {name: figures["answers"] for name, figures in table.items()}
    assert len(answers["softmax"]["tokens"]) == 4 and {len(of["tokens"]) for of in answers.values()} == {4, 2}
    again = [torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9]])]
    model = original("llama", "AutoModelForCausalLM").eval()
    theirs = proof.answers(model, words, again, None)
    ours = proof.answers(model, words, again, theirs)
    assert ours["tokens"] == theirs["tokens"] and ours["next_rows"] == [1.0, 1.0]
    assert ours["same"] == ours["next"] == {"short": 1.0, "long": 1.0}
    wrong = {"tokens": [[(t + 1) % 30 for t in of] for of in theirs["tokens"]]}
    assert proof.answers(model, words, again, wrong)["same"] == {"short": 0.0, "long": 0.0}
    difference = found["differences"]["window only"]["softmax"]["nats, rows"]
    nats = [math.log(table[name]["rows"]["perplexity"]) for name in ("window only", "softmax")]
    assert difference["value"] == pytest.approx(nats[0] - nats[1], abs=1e-4)
    assert found["needles"]["softmax"]["needle at 60"]["interval"] == list(proof.wilson(0, 2))
    # What is there is kept.
    found["columns"]["softmax"]["rows"]["perplexity"] = 1.0
    output.write_text(json.dumps(found))
    proof.main([*main, "--output", str(output)])
    assert json.loads(output.read_text())["columns"]["softmax"]["rows"]["perplexity"] == 1.0


def test_wrong_options_are_refused_before_the_work(tmp_path, monkeypatch, capsys):
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    words.save_pretrained(tmp_path / "softmax")
    (tmp_path / "text.txt").write_text(" ".join(WORDS * 40))
    monkeypatch.setattr(proof, "PASSAGE", 6)
    line = [str(tmp_path / "softmax"), "--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "proof.json")]
    line += ["--rows", "4", "--length", "48", "--long-rows", "2", "--long-length", "64"]
    # Without the original's answers, a KeyError after hours, or answers that are compared with nothing.
    with pytest.raises(SystemExit, match="got no softmax"):
        proof.main([*line, "--converted", "window=here", "--columns", "kernel and window"])
    with pytest.raises(SystemExit, match="only: got 'row', expected some of rows, copying, needle at 1024,"):
        proof.main([*line, "--converted", "window=here", "--only", "row"])
    for wrong, message in (
        ("windw=here", "got the name 'windw', expected one of exact, kernel,"),
        ("window", "got 'window', expected NAME=DIR"),
    ):
        with pytest.raises(SystemExit):
            proof.parse([*line, "--converted", wrong])
        assert f"converted: {message}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        proof.parse([*line, "--converted", "window=here", "--columns", "windw only"])
    assert not (tmp_path / "proof.json").exists()
