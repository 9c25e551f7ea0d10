"""`convert` and `distill` under FSDP 2: no process has more than its parts of the large weights, and one writes all."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import make_original, texts, tokenizer
from support.children import stage_one, tuning
from support.forks import together
from transformers import MixtralConfig, MixtralForCausalLM

OPTIONS = {
    "text_column": "text", "holdout": 4, "batch_size": 2, "distill_steps": 2, "eval_every": 1, "distill_length": 16,
    "device": "cpu",
}  # fmt: skip
IN_FILES = ("llama", "gpt2", "bart")
"""Models whose weights stay in their files; transformers rewrites those of a mixture of experts."""
MODELS = (*IN_FILES, "mixtral")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models, and what one process and two make of them; the llama's result is then distilled further."""
    root = tmp_path_factory.mktemp("sharded")
    texts(root, 40)
    make_original(root / "gpt2", "gpt2", "AutoModelForCausalLM")
    make_original(root / "bart", "bart", "AutoModelForSeq2SeqLM")
    make_original(root / "llama", "llama", "AutoModelForCausalLM", dtype="bfloat16")
    # A weights file for almost every weight.
    stage_one.split(root / "llama", 4000)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(
        vocab_size=99, intermediate_size=40, num_local_experts=2, max_position_embeddings=64, pad_token_id=0, **sizes
    )
    MixtralForCausalLM(config).save_pretrained(root / "mixtral")
    tokenizer().save_pretrained(root / "mixtral")
    for name in MODELS:
        # A process of two takes every other batch.
        stage_one.job(root, "convert", name, f"{name} one", OPTIONS | {"gradient_accumulation": 2})
    stage_one.job(root, "distill", "llama one", "llama more one", OPTIONS | {"gradient_accumulation": 2})
    jobs = [("convert", name, f"{name} two") for name in MODELS]
    jobs.append(("distill", "llama one", "llama more two"))
    together(stage_one.sharded_jobs, root, jobs, OPTIONS, IN_FILES, environment=tuning.FSDP)
    return root


def weights(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", [*MODELS, "llama more"])
def test_two_processes_write_what_one_writes(name, root):
    one, two = (weights(root / f"{name} {count}") for count in ("one", "two"))
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        if ".linear_attention." in key:
            torch.testing.assert_close(tensor, two[key], rtol=0, atol=2e-6)
        else:
            assert tensor.dtype == two[key].dtype and torch.equal(tensor, two[key])
    records = [json.loads((root / f"{name} {count}" / "config.json").read_text()) for count in ("one", "two")]
    first, second = (record["linearize"]["provenance"]["distillation"] for record in records)
    assert first["held_out_loss"] == pytest.approx(second["held_out_loss"], rel=1e-5)
