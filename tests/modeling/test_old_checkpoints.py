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
from safetensors.torch import load_file

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
        made = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        assert torch.equal(made, expected["generated"])
