"""Checkpoints of the first layout still load, and give the outputs that they gave when they were written.

The folders in `checkpoints/` were saved by the code of November 2026 from randomly initialised models of a few thousand
numbers, most layers with a kernel of their own, every kernel parameter moved from its start. They are never written
anew: a change that cannot read them breaks the checkpoints of users. Beside `config.json` and `model.safetensors` lie
inputs and outputs of that day in `expected.safetensors`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.generation import bounded_logits, generate_and_check
from transformers.core_model_loading import revert_weight_conversion

import linearize
from linearize.attention.interface import linear_attentions

FOLDER = Path(__file__).parent / "checkpoints"
HEADS = {"bert": "AutoModelForMaskedLM", "gpt2": "AutoModelForCausalLM"}
KERNELS = {
    "bert": ["hedgehog", "t2r", "luna"],
    "gpt2": ["flexformer_n", "flexformer_n", "performer", "macformer_exp", "norm_1elu", "diag_softmax"],
}


@pytest.mark.parametrize("name", HEADS)
def test_a_checkpoint_written_before_gives_the_same_outputs(name):
    model, info = getattr(transformers, HEADS[name]).from_pretrained(FOLDER / name, output_loading_info=True)
    assert not any(info.values()), info
    assert [layer.kernel for layer in linear_attentions(model).values()] == KERNELS[name]
    written = load_file(FOLDER / name / "model.safetensors")
    state = model.state_dict()
    assert set(written) <= set(state) and all(torch.equal(state[key], tensor) for key, tensor in written.items())
    expected = load_file(FOLDER / name / "expected.safetensors")
    inputs = {key.removeprefix("in."): tensor for key, tensor in expected.items() if key.startswith("in.")}
    with torch.no_grad():
        out = model.eval()(**inputs)[0][..., : expected["out"].shape[-1]]
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(out[real], expected["out"][real], rtol=1e-5, atol=1e-6)
    if "generated" in expected:
        ids, mask = inputs["input_ids"][1:], inputs["attention_mask"][1:]
        made, steps = expected["generated"], expected["generated"].shape[1] - ids.shape[1]
        exact, bound = bounded_logits(model, {"input_ids": ids, "attention_mask": mask}, made, steps)
        # The likeliest, or level with it as far as fp32 can tell.
        said = exact.gather(-1, made[:, -steps:, None])[..., 0]
        assert bool((said >= exact.amax(-1) - 2 * bound).all())
        generate_and_check(model, {"input_ids": ids, "attention_mask": mask}, max_new_tokens=8, do_sample=False)


def test_a_checkpoint_with_names_changed_twice(tmp_path):
    """Before 2026-12 a model's head and its body each had the renamings of their model type."""
    config = transformers.NomicBertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, vocab_size=99
    )
    torch.manual_seed(0)
    model = linearize.convert(transformers.NomicBertForMaskedLM(config).eval())
    names = set(revert_weight_conversion(model, model.state_dict()))
    twice = revert_weight_conversion(model, revert_weight_conversion(model, model.state_dict()))
    assert names != set(twice)
    linearize.save(model, tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) < names
    file = tmp_path / "out" / "model.safetensors"
    tied = names - set(load_file(file))
    save_file({k: x.contiguous() for k, x in twice.items() if k not in tied}, file, metadata={"format": "pt"})
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(x, loaded[key]) for key, x in model.state_dict().items())
