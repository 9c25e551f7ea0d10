"""What `compare` calls a difference, and what it calls noise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.checkpoints import make_original, make_text, texts
from support.command_lines import run

from linearize.evaluation.bench import meter
from linearize.evaluation.report import compare
from linearize.evaluation.report.paired import best_by, fastest, mean_difference


def difference(values):
    """Of a model with these figures from one with zeros."""
    return mean_difference("KL", "one", values, "other", [0.0] * len(values))


def p_value(values):
    """Fisher's paired randomisation test, two-sided, written out."""
    total = abs(sum(values))
    signs = itertools.product((-1, 1), repeat=len(values))
    sums = [abs(sum(sign * value for sign, value in zip(row, values, strict=True))) for row in signs]
    return sum(one >= total - 1e-12 for one in sums) / len(sums)


def test_the_interval_is_that_of_the_exact_test():
    """0 lies outside the interval exactly where the randomisation test rejects at 5 %."""
    generator = np.random.default_rng(0)
    outside = 0
    for count in (6, 7, 9, 10):
        for shift in (0.0, 0.5, 0.8, 1.2):
            values = generator.normal(shift, 1.0, size=count).tolist()
            found = difference(values)
            assert found.within_noise == (p_value(values) > 0.05)
            assert found.interval[0] <= found.value <= found.interval[1]
            outside += not found.within_noise
    assert 2 < outside < 14
    assert difference([1.0] * 6).interval == (1.0, 1.0) and difference([0.0] * 8).within_noise
    assert difference([1.0] * 5) is None
    assert not difference([1.0] * 40).within_noise
    # One number added in other orders is not a difference.
    assert difference([0.1, 0.2, -0.3] * 4).within_noise


def test_chance_alone_is_seldom_called_a_difference():
    generator = np.random.default_rng(0)
    for count in (10, 20):
        found = [not difference(generator.normal(size=count)).within_noise for _ in range(200)]
        assert 0 < sum(found) < 24
    assert not any(difference(generator.normal(1.5, 1.0, size=20)).within_noise for _ in range(20))


def test_verdicts():
    base = np.linspace(0.1, 0.4, 8)
    wobble = np.array([1, -1, 1, -1, 1, -1, 1, -1]) * 0.01
    said, differences = best_by("KL", {"a": base, "b": base + 0.1, "c": base + wobble + 0.001})
    assert said == "KL: a is better than b and within noise of c"
    assert [(one.side, one.minus, one.within_noise) for one in differences] == [("a", "b", False), ("a", "c", True)]
    assert differences[0].value == pytest.approx(-0.1) == differences[0].interval[0]
    said, _ = best_by("cosine", {"a": base, "b": base + 0.1}, larger_is_better=True)
    assert said == "cosine: b is better than a"
    said, differences = best_by("KL", {"a": [0.0] * 5, "b": [1.0] * 5})
    assert "5 inputs are too few" in said and differences == []
    assert fastest({"a": (1.0, 0.2), "b": (1.15, 0.2), "c": (2.0, 0.1)}) == (
        "seconds: a is better than c and within noise of b"
    )


def test_compare_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts(tmp_path, 48)
    make_original(tmp_path / "bert")
    for name, kernel in (("one", "hedgehog"), ("same", "hedgehog"), ("elu", "elu")):
        make_text(tmp_path / name, kernel=kernel)
    monkeypatch.setattr(meter.Noise, "too_noisy", property(lambda noise: False))
    line = "compare one same elu --original bert --dataset texts.jsonl --text-column text --inputs 8 --max-length 24"
    code, out, err = run(capsys, *f"{line} --lengths 16 --repeats 3 --device cpu".split())
    assert code == 0, err
    said = " ".join(out.split())
    assert "KL, nats per query: " in said and "within noise of" in said and "seconds: " in said
    code, out, _ = run(capsys, *f"{line} --lengths none --device cpu --overwrite --json".split())
    import json

    found = json.loads(out)
    one, same, elu = found["conversions"]
    assert one["per_input"] == same["per_input"] and len(elu["per_input"]["kl"]) == 8
    assert np.mean(one["per_input"]["output_error"]) == pytest.approx(one["output_error"], rel=0.3)
    kl = next(text for text in found["verdicts"] if text.startswith("KL"))
    assert ("one" in kl and "same" in kl) and not any(text.startswith("seconds") for text in found["verdicts"])


def test_all_are_timed_in_the_same_turns_and_noise_is_no_verdict(tmp_path, capsys, monkeypatch):
    """A model and its copy were 0.60 and 0.92 of softmax: each had been timed at its own moment."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "same"):
        make_text(tmp_path / name)
    turns = []

    def in_turns(sides, repeats, **_):
        turns.append((list(sides), repeats))
        return {(name, side): meter.Timing.of([1.0 if side == "softmax" else 0.5] * repeats) for name, side in sides}

    monkeypatch.setattr(compare, "in_turns", in_turns)
    monkeypatch.setattr(meter.Noise, "too_noisy", property(lambda noise: True))
    monkeypatch.chdir(tmp_path / "one")
    line = ["compare", ".", "../same", "--inputs", "6", "--lengths", "16", "--repeats", "3", "--device", "cpu"]
    code, out, err = run(capsys, *line)
    assert code == 0, err
    assert turns == [([("one", "softmax"), ("one", "linear"), ("same", "softmax"), ("same", "linear")], 3)]
    said = " ".join(out.split())
    assert "No verdict on speed, the machine was too noisy" in said and "seconds:" not in said and "(noisy)" in said


def test_all_are_looked_for_before_one_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_text(tmp_path / "one")
    code, out, err = run(capsys, "compare", "one", "./missing", "--lengths", "none", "--device", "cpu")
    assert (code, out) == (2, "") and err.endswith(
        "linearize: error: './missing' does not exist; expected the folder of a checkpoint, or a Hub name\n"
    )


def test_no_verdict_between_models_with_other_tokens(tmp_path, capsys, monkeypatch):
    """Texts under another tokenizer are other inputs, but their figures were paired."""
    import json

    monkeypatch.chdir(tmp_path)
    texts(tmp_path, 48)
    for name in ("one", "other"):
        make_text(tmp_path / name)
    file = tmp_path / "other" / "tokenizer.json"
    values = json.loads(file.read_text())
    words = values["model"]["vocab"]
    words["cat"], words["sat"] = words["sat"], words["cat"]
    file.write_text(json.dumps(values))
    line = "compare one other --dataset texts.jsonl --text-column text --inputs 8 --lengths none --device cpu --json"
    code, out, err = run(capsys, *line.split())
    assert code == 0, err
    found = json.loads(out)
    assert found["verdicts"] == found["differences"] == []
    assert any("other tokens" in note and "other and one" in note for note in found["notes"])
