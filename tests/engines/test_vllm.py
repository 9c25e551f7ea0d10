"""Converted models in vLLM against `generate` and the model itself; run by `make vllm`, where vLLM is installed."""

import contextlib
import gc
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `make vllm` installs it", allow_module_level=True)

# In this process, so that tests see the scheduler; and little memory.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from support import kernel_cases, tiny
from support.checkpoints import tokenizer
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

import linearize
from linearize.conversion.plan import replan
from linearize.core.errors import UnsupportedModelError
from linearize.core.registry import kernel_infos
from linearize.vllm import register
from linearize.vllm.config import CAUSAL, EMBEDDER, HYBRID, Checks, original_config
from linearize.vllm.layer import stored

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 256}
"""vLLM's attention on a CPU takes no smaller heads."""
LLAMA = {**SIZES, "num_hidden_layers": 3, "initializer_range": 0.3}
ALL = {"window": 8, "sinks": 2, "exact_keys": 3, "scale": "network"}
NEAR_TIE = 1e-3
"""Logits closer than this may change places: vLLM's own layers round in another order."""


def kernels():
    """Every kernel for decoders, one per layer, each with a window if it takes one."""
    found = []
    for info in kernel_infos():
        if info.preset is None and info.causal and info.streamable:
            found.append((info.name, kernel_cases.needed(info) | ({"window": 8} if info.windowed else {})))
    return found


GROUPED = {**LLAMA, "num_key_value_heads": 2}
DECODERS = {
    "every kernel": ("llama", {**GROUPED, "num_hidden_layers": len(kernels()), "initializer_range": 0.05}, kernels()),
    "gpt2": (
        "gpt2",
        {"n_embd": 64, "n_head": 2, "n_layer": 3, "n_positions": 256, "initializer_range": 0.3},
        [("elu", {}), ("hedgehog", ALL), ("relu", {"window": 4})],
    ),
    "layers and heads with softmax": (
        "qwen2",
        {**GROUPED, "num_hidden_layers": 4},
        [
            ("hedgehog", {"window": 8, "trained_length": 20, "scale": "linear", "softmax_heads": (1,)}),
            ("softmax", {}),
            ("hedgehog", ALL | {"softmax_heads": (0, 1, 3)}),
            ("elu", {}),
        ],
    ),
}
"""Model, sizes, and a kernel with its arguments for every layer."""


def decoder(name):
    host, sizes, layers = DECODERS[name]
    model = tiny.original(host, "AutoModelForCausalLM", **sizes)
    plan = replan(model, linearize.plan(model, kernel="elu"), dict(enumerate(layers)), max_length=256)
    return tiny.stir(linearize.apply(model, plan)).eval()


def start(model, folder, **options):
    """Start an engine for a model."""
    model.save_pretrained(folder)
    usual = {"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256}
    return LLM(str(folder), **usual | {"disable_log_stats": False} | options)


@pytest.fixture(scope="module", params=DECODERS)
def served(request, tmp_path_factory):
    """A decoder and its engine, which reads prompts in chunks of 32 tokens."""
    model = decoder(request.param)
    yield model, start(model, tmp_path_factory.mktemp("model"), max_num_batched_tokens=32, max_num_seqs=16)
    gc.collect()


def prompts(lengths, vocabulary=99):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def greedy(tokens):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


@torch.no_grad()
def same(model, prompt, got):
    """Check that greedy tokens are those of `generate`, up to a near tie, after which texts may part."""
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


def test_requests_alone_and_together_continue_as_generate_does(served):
    """Prompts of 1 token, of less than a chunk, of several chunks."""
    model, llm = served
    same(model, *(texts := prompts([70])), run(llm, texts, 60)[0])
    texts = prompts([1, 5, 9, 17, 33, 60, 100, 2, 64, 31])
    for text, got in zip(texts, run(llm, texts, 30), strict=True):
        same(model, text, got)


def test_requests_that_arrive_and_leave_in_between_change_no_others(served):
    """The block of a request that was aborted goes to another, which must not see its state."""
    model, llm = served
    engine, texts, got = llm.llm_engine, prompts([3 + 5 * i for i in range(16)]), {}
    waiting, steps, left = list(enumerate(texts)), 0, None
    while waiting or engine.has_unfinished_requests():
        if waiting and steps % 2 == 0:
            for number, text in waiting[:3]:
                engine.add_request(str(number), {"prompt_token_ids": text}, greedy(20))
            waiting = waiting[3:]
        for output in engine.step():
            got[int(output.request_id)] = list(output.outputs[0].token_ids)
        if left is None and 1 in got:
            left = 1
            engine.abort_request(["1"])
        steps += 1
    assert left == 1 and len(got[1]) < 20
    for number, text in enumerate(texts):
        if number != left:
            same(model, text, got[number])


def test_only_softmax_needs_more_memory_for_a_longer_text(served):
    model, llm = served
    engine, used = llm.llm_engine, []
    scheduler = engine.engine_core.engine_core.scheduler
    engine.add_request("one", {"prompt_token_ids": prompts([5])[0]}, greedy(200))
    while engine.has_unfinished_requests():
        used.append(scheduler.kv_cache_manager.usage)
        engine.step()
    layers = linearize.Plan.from_dict(model.config.linearize).layers
    keys = any(layer.hybrid.softmax_heads or not layer.converted for layer in layers)
    # Before the first step, the request has nothing.
    assert used[0] == 0 and used[1] > 0 and len(used) == 200
    assert used[-1] > used[1] if keys else set(used[1:]) == {used[1]}
    # States of different sizes share one table of blocks.
    assert keys or len(scheduler.kv_cache_config.kv_cache_groups) == 1


def test_preempted_requests_begin_again(tmp_path):
    """Keys of softmax grow until there is no block left: at first a request takes 6, beyond 128 tokens 9."""
    model = decoder("layers and heads with softmax")
    llm = start(model, tmp_path, num_gpu_blocks_override=30, max_num_seqs=4)
    texts = prompts([40, 50, 60, 70])
    for text, got in zip(texts, run(llm, texts, 150), strict=True):
        same(model, text, got)
    assert sum(one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions") > 0


def test_a_known_beginning_is_read_once(tmp_path):
    """vLLM copies the state at the end of a block of keys."""
    model = decoder("layers and heads with softmax")
    llm = start(model, tmp_path, enable_prefix_caching=True)
    block = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.cache_hit_alignment_tokens
    beginning, ends = prompts([block])[0], prompts([3, 7])
    cached = []
    for end in ends:
        text = beginning + end
        output = llm.generate([{"prompt_token_ids": text}], greedy(20), use_tqdm=False)[0]
        cached.append(output.num_cached_tokens)
        same(model, text, list(output.outputs[0].token_ids))
    assert cached == [0, block]


@pytest.mark.parametrize("name", ["every kernel", "gpt2"])
@torch.no_grad()
def test_a_state_takes_the_memory_of_generate_s_cache(name):
    model = decoder(name)
    layers = linearize.Plan.from_dict(model.config.linearize).converted
    cache = model.new_cache()
    model(torch.ones(1, 20, dtype=torch.long), past_key_values=cache)
    padding = 16 * len(layers)
    assert cache.nbytes() <= sum(stored(layer, torch.float32)[1] for layer in layers) < cache.nbytes() + padding


def test_embedders_give_the_same_vectors(tmp_path):
    model = tiny.converted("bert", config={**SIZES, "num_attention_heads": 2, "head_dim": 32}, window=4)
    tokenizer().save_pretrained(tmp_path)
    pooling = {"seq_pooling_type": "MEAN", "use_activation": False}
    llm = start(model, tmp_path, skip_tokenizer_init=False, pooler_config=pooling)
    texts = prompts([1, 7, 40, 3])
    outputs = llm.embed([{"prompt_token_ids": text} for text in texts], use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        with torch.no_grad():
            want = model(torch.tensor([text])).last_hidden_state[0].mean(dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-4, atol=1e-5)


def test_a_folder_loaded_next_to_an_engine_keeps_its_kernels(tmp_path):
    """The plug-in changes how vLLM reads config.json, not how transformers does."""
    register()
    decoder("gpt2").save_pretrained(tmp_path)
    assert hasattr(AutoModelForCausalLM.from_pretrained(tmp_path).transformer.h[0].attn, "linear_attention")


@pytest.mark.parametrize(
    ("name", "head", "runner"),
    [
        ("llama", "AutoModelForCausalLM", CAUSAL),
        ("bert", "AutoModel", EMBEDDER),
        ("llama", "AutoModel", None),
        ("bert", "AutoModelForMaskedLM", None),
        ("bart", "AutoModelForSeq2SeqLM", None),
    ],
)
def test_models_without_a_runner_are_refused(name, head, runner):
    config = linearize.convert(tiny.original(name, head), "elu").config
    if runner is None:
        with pytest.raises(UnsupportedModelError, match=r"vLLM: got .*, expected"):
            original_config(config)
        return
    plain = original_config(config)
    assert plain.architectures == [runner] and plain.model_type == name


def test_states_that_grow_with_the_text_are_refused():
    """Routed blocks look up all earlier keys."""
    model = tiny.original("llama", "AutoModelForCausalLM")
    config = linearize.convert(model, "hedgehog", window=8, routed_blocks="2:4").config
    with pytest.raises(UnsupportedModelError, match="got a layer with routed-blocks=2:4, expected"):
        original_config(config)
    with pytest.raises(
        UnsupportedModelError, match=r"vLLM: got kernel 'hedgehog', whose state grows with the text, expected"
    ):
        stored(linearize.Plan.from_dict(config.linearize).layers[0], torch.float32)


def test_some_softmax_needs_the_runner_with_keys():
    config = linearize.convert(tiny.original("llama", "AutoModelForCausalLM"), "elu", keep_softmax=[0]).config
    assert original_config(config).architectures == [HYBRID]


class Engine:
    """The config of an engine, without anything that a converted model cannot follow."""

    def __init__(self, **changed):
        self.parallel_config = self.model_config = self.cache_config = self
        self.speculative_config = self.lora_config = self.quantization = self.kv_transfer_config = None
        self.architecture, self.convert_type = EMBEDDER, "none"
        vars(self).update(changed)


@pytest.mark.parametrize(
    "option",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
        {"decode_context_parallel_size": 2},
        {"kv_transfer_config": object()},
        {"convert_type": "embed", "architecture": CAUSAL},
        {"convert_type": "classify"},
        {"speculative_config": object()},
        {"lora_config": object()},
        {"quantization": "fp8"},
        {"architecture": CAUSAL, "enable_prefix_caching": True},
    ],
)
def test_options_under_which_states_would_be_wrong_are_refused(option):
    Checks.verify_and_update_config(Engine())
    with pytest.raises(UnsupportedModelError, match="for a converted model, expected"):
        Checks.verify_and_update_config(Engine(**option))


def test_the_server_gives_the_tokens_of_generate(tmp_path):
    """The command `vllm serve` starts the same server; vllm-cpu's own ends at once, as it asks for a package `vllm`."""
    model = decoder("layers and heads with softmax")
    linearize.save(model, tmp_path / "model", processor=tokenizer())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--port", address.rsplit(":")[-1]]
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "model")]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([*command, *options], env=environment, cwd=tmp_path, stdout=log, stderr=log)
    try:
        ready = False
        while not ready and server.poll() is None:
            time.sleep(1)
            with contextlib.suppress(OSError):
                ready = urllib.request.urlopen(f"{address}/health").status == 200
        assert ready, (tmp_path / "log").read_text()[-2000:]
        for prompt in prompts((3, 40)):
            asked = {"model": str(tmp_path / "model"), "prompt": prompt, "max_tokens": 20, "temperature": 0}
            body = json.dumps(asked | {"ignore_eos": True, "return_token_ids": True}).encode()
            request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
            same(model, prompt, json.load(urllib.request.urlopen(request))["choices"][0]["token_ids"])
    finally:
        server.terminate()
        server.wait()


@pytest.mark.parametrize(
    "overrides",
    [
        *({"architectures": ["LlamaForCausalLM"]}, {"linearize": None}, {"model_type": "llama"}, {"is_causal": False}),
        lambda x: x,
    ],
)
def test_overrides_by_which_something_else_would_run_are_refused(tmp_path, overrides):
    """A kernel without weights would leave no trace of it."""
    model = linearize.convert(tiny.original("llama", "AutoModelForCausalLM", **LLAMA), "elu")
    with pytest.raises(UnsupportedModelError, match=r"^vLLM: got hf_overrides=.* for a converted model, expected"):
        start(model, tmp_path, hf_overrides=overrides)


def test_a_version_that_was_not_tried_is_named(monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "9.9.9")
    with pytest.warns(UserWarning, match=r"not tried with vLLM 9\.9\.9, only with"):
        register()
