"""The kernels that fit a model; and the one table of what was measured, which is that of the documents."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.checkpoints import make_original, make_text
from support.command_lines import run

import linearize
from linearize.core.registry import kernel_info, kernel_infos, make_config
from linearize.evaluation.bench.measured import (
    CAUSAL,
    DECODE,
    EMBEDDING,
    EXPERIMENTS,
    FORWARD,
    MIXTURE,
    QUALITY,
    SPEED,
    default_quality,
    quality_of,
)

CHECKOUT = Path(linearize.__file__).parent.parent
BENCHMARKS = CHECKOUT / "docs" / "benchmarks"
KERNELS = (BENCHMARKS / "kernels.md").read_text(encoding="utf-8")
TIMES = (BENCHMARKS / "speed.md").read_text(encoding="utf-8")


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_quality_is_that_of_the_documents():
    rows = KERNELS.partition("| kernel (F, head size 32) |")[2].partition("\n\n")[0].splitlines()[2:]
    said = {}
    for row in rows:
        name, kl = cells(row)[:2]
        arguments = dict(part.split("=") for part in re.findall(r"`(\w+=\w+)`", name))
        said[re.match(r"\w+", name)[0], tuple(sorted(arguments.items()))] = float(kl)
    ours = {
        (one.kernel, tuple(sorted((key, str(value)) for key, value in one.arguments.items()))): one.kl
        for one in QUALITY
        if one.experiment == MIXTURE
    }
    assert ours == said
    results = json.loads((CHECKOUT / EXPERIMENTS[EMBEDDING][1]).read_text())["rows"]
    said = {
        row["row"]: (row["stage_one"]["after"]["kl"], row["recovered_percent"]) for row in results if row["stage_one"]
    }
    assert {one.kernel: (one.kl, one.score) for one in QUALITY if one.experiment == EMBEDDING} == said


def test_speed_is_that_of_the_documents():
    rows = TIMES.partition("| hedgehog, native | flexformer_n, native |")[2].partition("\n\n")[0]
    said, what = {}, ""
    for row in rows.splitlines()[2:]:
        name, tokens, *_, hedgehog, flexformer_n = cells(row)
        what = name.partition(", after")[0] or what
        for kernel, figure in (("hedgehog", hedgehog), ("flexformer_n", flexformer_n)):
            said[kernel, what, int(tokens.replace(",", ""))] = float(figure or "nan")
    for what, (tokens, times) in SPEED.items():
        for kernel, figure in times.items():
            if kernel == "luna":
                assert f"| luna, forward | {tokens:,} | 2.4 | {figure:g} |" in TIMES and what == FORWARD
            else:
                assert said[kernel, what, tokens] == figure
    assert set(SPEED) == {FORWARD, CAUSAL, DECODE}


def test_what_was_measured_is_of_kernels_that_are_there():
    for one in QUALITY:
        make_config(kernel_info(one.kernel), one.arguments)
    assert default_quality("hedgehog").experiment == EMBEDDING and default_quality("rfa") is None
    assert len(quality_of("flexformer_n")) == 5 and not any("t2r" in times for _, times in SPEED.values())
    assert all(20 < len(info.choose) < 100 and not info.choose.endswith(".") for info in kernel_infos())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("choose")
    make_original(root / "bert")
    make_original(root / "gpt2", "gpt2", "AutoModelForCausalLM", n_embd=264, n_head=2, n_positions=2048)
    make_original(root / "vit", "vit", "AutoModelForImageClassification")
    make_text(root / "linear")
    return root


def sizes_for(capsys, name):
    code, out, err = run(capsys, "kernels", "--for", name, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_short_encoder_with_small_heads(place, capsys):
    found = sizes_for(capsys, place / "bert")
    assert (found["attentions"], found["causal"], found["head_dims"], found["longest"]) == (2, False, [8], 64)
    assert [one["name"] for one in found["kernels"]][:3] == ["flexformer_n", "hedgehog", "luna"]
    hedgehog = found["kernels"][1]
    # 2 layers of 4 heads of size 8: d^2 + d parameters; sums [2 d, d + 1] of 4 bytes.
    assert (hedgehog["features"], hedgehog["parameters"], hedgehog["state_bytes"]) == (16, 8 * 72, 8 * 16 * 9 * 4)
    assert hedgehog["times_faster"] == 30.6


def test_a_causal_model_with_large_heads(place, capsys):
    found = sizes_for(capsys, place / "gpt2")
    assert (found["causal"], found["head_dims"], found["longest"]) == (True, [132], 2048)
    assert "128" in found["refused"]["taylor"]
    assert next(one for one in found["kernels"] if one["name"] == "hedgehog")["times_faster"] == 51.4


def test_images_and_what_is_converted_already(place, capsys):
    found = sizes_for(capsys, place / "vit")
    assert not found["causal"] and len(found["kernels"]) + len(found["refused"]) > 20
    assert sizes_for(capsys, place / "linear")["attentions"] == 2


def test_the_verb_prints_it(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    code, out, _ = run(capsys, "kernels", "--for", "bert")
    assert code == 0 and "bert: 2 attentions, bidirectional, heads of size 8, takes 64 tokens" in out
    assert "docs/results/minilm-embedding.json" in out
    code, out, _ = run(capsys, "kernels", "--for", "gpt2")
    assert "taylor does not fit: " in out
    code, _, err = run(capsys, "kernels", "elu", "--for", "bert")
    assert code == 2 and "drop one" in err
    assert run(capsys, "kernels", "--for", "nowhere/at-all")[0] == 2
    code, out, _ = run(capsys, "kernels", "flexformer_n")
    assert "form=paper, floor=0: KL 0.314" in " ".join(out.split()) and "46.4 times faster" in out
    code, out, _ = run(capsys, "kernels")
    assert "0.043 a" in out and "1.307 b" in out and "30.6 x" in out and "4.57" in out
