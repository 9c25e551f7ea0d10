"""Converted models in vLLM against `generate` and the model itself; run by `make vllm`, where vLLM is installed."""

import gc
import importlib.util
import os

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `make vllm` installs it", allow_module_level=True)

# In this process, so that tests see the scheduler; and little memory.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from vllm import LLM, SamplingParams

import linearize
from linearize.conversion.plan import replan
from linearize.core.errors import ConfigError
from linearize.core.registry import kernel_infos
from support import kernel_cases, tiny

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 256}
"""vLLM's attention on a CPU takes no smaller heads."""
LLAMA = {**SIZES, "num_hidden_layers": 3, "initializer_range": 0.3}
ALL = {"window": 8, "sinks": 2, "exact_keys": 3, "scale": "network"}
NEAR_TIE = 1e-3
"""Logits closer than this may change places: vLLM's own layers round in another order."""


def chosen(*layers):
    """Return the choices for `replan`: by layer, a kernel and its arguments."""
    return {index: (kernel, dict(values)) for index, (kernel, values) in enumerate(layers)}


def kernels():
    """Every kernel for decoders, each with the additions that it takes."""
    found = []
    for info in kernel_infos():
        if info.preset is None and info.causal and info.streamable:
            additions = {"window": 8} if info.needs_window else {}
            found.append((info.name, kernel_cases.needed(info) | additions))
    return found


DECODERS = {
    "llama": ("llama", {**LLAMA, "num_key_value_heads": 2}, chosen(*[("hedgehog", ALL)] * 3)),
    "gpt2": (
        "gpt2",
        {"n_embd": 64, "n_head": 2, "n_layer": 3, "n_positions": 256, "initializer_range": 0.3},
        chosen(("elu", {}), ("hedgehog", ALL), ("relu", {"window": 4})),
    ),
    "qwen2-some-softmax": (
        "qwen2",
        {**LLAMA, "num_key_value_heads": 2},
        chosen(("hedgehog", {"window": 8, "trained_length": 20, "scale": "linear"}), ("softmax", {}), ("elu", {})),
    ),
    "softmax-heads": (
        "llama",
        {**LLAMA, "num_key_value_heads": 2},
        chosen(
            ("hedgehog", ALL | {"softmax_heads": (1,)}),
            ("hedgehog", ALL | {"softmax_heads": (0, 1, 3)}),
            ("hedgehog", ALL),
        ),
    ),
}


def decoder(name, sizes, choices):
    model = tiny.original(name, "AutoModelForCausalLM", **sizes)
    plan = replan(model, linearize.plan(model, kernel="elu"), choices, max_length=256)
    return tiny.stir(linearize.apply(model, plan)).eval()


@pytest.fixture
def engine(tmp_path):
    """Start an engine for a model, `engine(model, **options)`; it is stopped after the test."""
    running = []

    def start(model, **options):
        model.save_pretrained(tmp_path / "model")
        usual = {"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256}
        running.append(LLM(str(tmp_path / "model"), **usual | {"disable_log_stats": False} | options))
        return running[-1]

    yield start
    running.clear()
    gc.collect()


def prompts(lengths, vocabulary=99):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def greedy(tokens):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


@torch.no_grad()
def same(model, prompt, got):
    """Check that greedy tokens are those of `generate`, up to near ties, after which texts may part."""
    given = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(given), "eos_token_id": None, "pad_token_id": 0}
    want = model.generate(given, max_new_tokens=len(got), do_sample=False, **options)[0, len(prompt) :].tolist()
    if got == want:
        return
    place = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    logits = model(torch.tensor([prompt + want[:place]])).logits[0, -1]
    assert logits[want[place]] - logits[got[place]] < NEAR_TIE, f"token {place} after {len(prompt)} tokens differs"


def run(llm, texts, tokens):
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], greedy(tokens), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("case", DECODERS)
def test_decoders_continue_as_generate_does(engine, case):
    """Alone and together, with prompts read in chunks."""
    model = decoder(*DECODERS[case])
    llm = engine(model, max_num_batched_tokens=32, max_num_seqs=8)
    texts = prompts([1, 5, 9, 17, 33, 60, 100, 2, 64, 31])
    for text, got in zip(texts, run(llm, texts, 40), strict=True):
        same(model, text, got)
    same(model, texts[6], run(llm, [texts[6]], 100)[0])
