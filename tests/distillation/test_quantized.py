"""`--quantize-frozen`: kernels learn from a model in 4 or 8 bits, and the result has the original weights."""

from __future__ import annotations

import sys

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import make_original, texts
from support.children import tuning
from support.command_lines import run
from support.tiny import inputs_of, original
from support.training import SCORES, Fixed
from transformers.pytorch_utils import Conv1D

import linearize
from linearize.checkpoint.loading import load_model
from linearize.core.errors import ConfigError
from linearize.jobs.config import ConvertJob
from linearize.training.stage_one import DistillConfig
from linearize.training.stage_one.loop import distill

LINE = "--dataset texts.jsonl --text-column text --holdout 8 --batch-size 4 --device cpu --distill-steps 3"


@pytest.fixture
def library():
    """The library that quantises."""
    return pytest.importorskip("bitsandbytes", reason='it is an extra of its own: pip install "linearize[quantize]"')


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts(tmp_path, 40)
    make_original(tmp_path / "llama", "llama", "AutoModelForCausalLM", dtype="bfloat16")
    return tmp_path


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_passes_have_the_quantised_weights_and_kernels_learn(name, library, tmp_path):
    """GPT-2's weights are [in, out] (Conv1D), and their groups of 64 numbers those of the transposed ones."""
    model = original(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if any(part in key for part in SCORES):
                parameter.mul_(8)
    model.save_pretrained(tmp_path)
    data = Fixed([inputs_of(model) for _ in range(2)])

    def trained(in_files, change=lambda model: None, **options):
        model = load_model(str(tmp_path), in_files=in_files).model
        change(model)
        model = linearize.convert(model)
        result = distill(model, data, DistillConfig(steps=8, eval_every=2, **options))
        return model, [*result.history[0].losses.values()], result

    def round_trip(model):
        """The weights after their way through 4 bits; the scales of the groups are in 8 bits (QLoRA, section 3)."""
        quantise, restore = library.functional.quantize_4bit, library.functional.dequantize_4bit
        for module in model.base_model.modules():
            if isinstance(module, torch.nn.Linear | Conv1D):
                turned = module.weight.data.T if isinstance(module, Conv1D) else module.weight.data
                there = restore(*quantise(turned.contiguous(), quant_type="nf4", compress_statistics=True))
                module.weight.data = there.T.contiguous() if isinstance(module, Conv1D) else there

    _, plain, _ = trained(False)
    _, rounded, _ = trained(False, round_trip)
    errors = []
    for how in ("4bit", "8bit"):
        model, first, result = trained(True, quantize_frozen=how)
        assert result.best_step > 0 and result.after.mean("kl") < result.before.mean("kl")
        assert all(x.dtype == torch.float32 for key, x in model.named_parameters() if ".linear_attention." in key)
        assert sum(x.is_meta for x in model.parameters()) > len(model.state_dict()) // 2
        errors.append(max(abs(a - b) / a for a, b in zip(plain, first, strict=True)))
        if how == "4bit":
            assert first == pytest.approx(rounded, rel=1e-6) and first != pytest.approx(plain, rel=1e-3)
    assert errors[1] < 0.3 * errors[0]


def test_the_result_has_the_original_weights(library, here, capsys):
    for line in (
        f"convert llama {LINE} --quantize-frozen 4bit --output one",
        f"distill one {LINE} --quantize-frozen 8bit --output two",
    ):
        code, _, err = run(capsys, *line.split())
        assert code == 0, err
    before, one, two = (load_file(here / name / "model.safetensors") for name in ("llama", "one", "two"))
    assert one.keys() == two.keys() and before.keys() < one.keys()
    assert all(torch.equal(one[key], before[key]) and torch.equal(two[key], before[key]) for key in before)
    kernels = one.keys() - before.keys()
    assert any(not torch.equal(one[key], two[key]) for key in kernels)
    assert all(one[key].dtype == torch.float32 for key in kernels)


def test_without_the_library_its_install_command_is_named(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    before = sorted(here.rglob("*"))
    code, _, err = run(capsys, *f"convert llama {LINE} --quantize-frozen 4bit --output made".split())
    assert code == 2 and 'pip install "linearize[quantize]"' in err and err.count("\n") == 1
    assert sorted(here.rglob("*")) == before


def test_what_it_cannot_do_is_refused(here, capsys, monkeypatch):
    needs_whole = {"kernel": "auto"}, {"window": "auto"}, {"keep_softmax_heads": "2"}, {"align_steps": 3}
    for options in (*needs_whole, {"stream_blocks": True}):
        with pytest.raises(ConfigError, match=r"got .* with --(quantize-frozen|stream-blocks), but"):
            ConvertJob.of(model="none", quantize_frozen="4bit", **options)
    assert ConvertJob.of(model="none", quantize_frozen="4bit").align.steps == 0
    (here / "small.gguf").write_bytes(b"GGUF")
    line = f"{LINE} --quantize-frozen 4bit --output made".split()
    code, _, err = run(capsys, "convert", "small.gguf", *line)
    assert code == 2 and "quantize_frozen: got the GGUF file" in err and err.count("\n") == 1
    for name, value in {"WORLD_SIZE": "2", **tuning.FSDP}.items():
        monkeypatch.setenv(name, value)
    code, _, err = run(capsys, "convert", "llama", *line)
    assert code == 2 and "quantize_frozen: got FSDP" in err and err.count("\n") == 1
    assert not list(here.glob("*made*"))
