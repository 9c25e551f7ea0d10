"""`convert --dry-run --device-memory SIZE`: the bytes of real models, from config.json alone."""

from __future__ import annotations

import json

import pytest
import torch
from support.command_lines import run
from support.scripts import script
from support.tiny import original

import linearize
from linearize.core.errors import ConfigError, LinearizeError
from linearize.jobs.bill import memory_bill, parse_size
from linearize.jobs.config import ConvertJob
from linearize.modeling.model import kernel_parameters
from linearize.training.alignment.loop import trained_parameters
from linearize.training.alignment.pair import find_blocks

NAMES = {
    "llama": "AutoModelForCausalLM",
    "bert": "AutoModelForMaskedLM",
    "gpt2": "AutoModelForCausalLM",
    "vit": "AutoModelForImageClassification",
}


def without_weights(folder, name, dtype):
    """Write the config of a tiny model, and return that model."""
    model = original(name, NAMES[name]).to(dtype)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    return model


def stages_of(bill):
    return {stage.stage: stage.bytes for stage in bill.stages}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_weights_and_optimizer_are_those_of_the_model(name, dtype, tmp_path):
    model = without_weights(tmp_path, name, dtype)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    counted = sum(parameter.numel() for parameter in model.parameters())
    linearize.convert(model)
    kernels = sum(parameter.numel() for parameter in kernel_parameters(model))
    bill = memory_bill(ConvertJob.of(model=str(tmp_path)), "cpu", devices=2, memory=10**9)
    assert (bill.parameters, bill.kernels) == (counted, kernels)
    # Buffers that are saved, such as position numbers, count as weights.
    assert weights <= bill.weights <= weights + 2000
    stages = stages_of(bill)
    assert stages["stage one"] > stages["stage one, streamed"] and stages["stage one"] > weights + 20 * kernels
    for train in ("attention", "blocks"):
        names = trained_parameters(model, find_blocks(model), train)
        trained = [parameter for key, parameter in names.items() if ".linear_attention." not in key]
        per_weight = 20 if dtype == torch.float32 else 22
        # The weights, the teacher's copy and training, of what is trained; kernels are fp32.
        expected = bill.weights + sum(x.nbytes + per_weight * x.numel() for x in trained) + 28 * kernels
        assert stages[f"alignment, --train {train}"] == expected
    assert stages["alignment, --train kernels"] == bill.weights + 24 * kernels


def test_a_device_that_is_too_small_gets_the_bill(tmp_path, capsys):
    without_weights(tmp_path / "llama", "llama", torch.bfloat16)
    line = ["convert", tmp_path / "llama", "--dry-run", "--output", tmp_path / "made"]
    code, out, err = run(capsys, *line, "--devices", 8, "--device-memory", "1KB", "--json")
    assert code == 2 and "It does not fit: stage one on 8 devices" in err and not json.loads(out)["fits"]
    assert "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 8" in err and "--stream-blocks" in err
    code, out, err = run(capsys, *line, "--device-memory", "2GiB", "--json")
    assert code == 0 and "Stage one fits on 1 device" in err and "FSDP" not in err and json.loads(out)["fits"]
    assert not (tmp_path / "made").exists()
    for wrong in (["--device-memory", "much"], ["--devices", 2], ["--devices", 0, "--device-memory", "1GB"]):
        code, _, err = run(capsys, *line, *wrong)
        assert code == 2 and "device-memory: got" in err and err.count("\n") == 1
    line.remove("--dry-run")
    code, _, err = run(capsys, *line, "--device-memory", "1GB")
    assert code == 2 and "with --dry-run" in err


def test_what_only_weights_can_decide_is_refused(tmp_path):
    without_weights(tmp_path, "bert", torch.float32)
    for options in ({"kernel": "auto"}, {"window": "auto"}, {"keep_softmax_heads": "2"}):
        with pytest.raises(ConfigError, match="device-memory"):
            memory_bill(ConvertJob.of(model=str(tmp_path), **options))
    with pytest.raises(LinearizeError, match="nowhere"):
        memory_bill(ConvertJob.of(model=str(tmp_path / "nowhere")))


def test_sizes_are_read():
    sizes = {"80GB": 80 * 10**9, "24 GiB": 24 * 2**30, "1.5tb": 1.5 * 10**12, "512MB": 512 * 10**6}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("80", "GB", "-1GB", "0GB", "1e9GB", "80XB"):
        with pytest.raises(ConfigError, match="device-memory: got"):
            parse_size(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "hidden", "wide", "heads", "weights"), [(32, 4096, 14336, 32, 16.06e9), (80, 8192, 28672, 64, 141.1e9)]
)
def test_the_bill_of_an_8b_and_a_70b(layers, hidden, wide, heads, weights, tmp_path):
    values = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128_256, "hidden_size": hidden,
        "intermediate_size": wide, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
        "max_position_embeddings": 131_072, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    bill = memory_bill(ConvertJob.of(model=str(tmp_path)), devices=8, memory=80 * 10**9)
    stages = stages_of(bill)
    assert bill.weights == pytest.approx(weights, rel=0.001)
    assert weights < stages["stage one"] < weights + 5e9 and stages["stage one, streamed"] < 9e9
    assert stages["stage one, FSDP 2"] < 30e9 and bill.fits


@pytest.mark.slow
def test_stage_one_needs_what_the_bill_says(tmp_path):
    """Within 15 %, of a random Llama with 0.1B parameters, whole and streamed."""
    options = ["--work", str(tmp_path), "--output", str(tmp_path / "found.json"), "--rows", "2", "--tokens", "128"]
    script("measure_stage_one_memory").main([*options, "--sizes", "0.1B"])
    found = {row["way"]: row["ratio"] for row in json.loads((tmp_path / "found.json").read_text())["results"]}
    assert set(found) == {"stage one", "stage one, streamed"} and all(0.85 <= x <= 1.15 for x in found.values()), found
