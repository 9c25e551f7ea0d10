"""Runs where vLLM is installed: generates from, or embeds, the inputs that `compare.py` left in a folder.

Usage: python vllm_child.py FOLDER, which holds checkpoints, and their inputs in `NAME.inputs`.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, PoolingParams, SamplingParams

CHUNK = 32
"""Tokens that vLLM reads at once: fewer than the longest prompt has, and than all prompts have together."""

root = Path(sys.argv[1])
for name, (_, options) in json.loads((root / "jobs.json").read_text()).items():
    inputs = load_file(root / f"{name}.inputs")
    masks = inputs["attention_mask"].bool()
    prompts = [{"prompt_token_ids": ids[real].tolist()} for ids, real in zip(inputs["input_ids"], masks, strict=True)]
    usual = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128}
    if options:
        llm = LLM(
            str(root / name), **usual, max_num_batched_tokens=CHUNK, max_num_seqs=16, logprobs_mode="raw_logits",
            max_logprobs=-1,
        )  # fmt: skip
        greedy = SamplingParams(
            temperature=0, max_tokens=options["max_new_tokens"], ignore_eos=True, detokenize=False, logprobs=-1
        )
        outputs = [one.outputs[0] for one in llm.generate(prompts, greedy, use_tqdm=False)]
        values = [
            [[step[token].logprob for token in range(len(step))] for step in output.logprobs] for output in outputs
        ]
        found = {
            "sequences": torch.tensor([list(output.token_ids) for output in outputs]),
            "values": torch.tensor(values),
        }
    else:
        llm = LLM(str(root / name), **usual, pooler_config={"task": "token_embed", "use_activation": False})
        outputs = llm.encode(prompts, PoolingParams(use_activation=False), pooling_task="token_embed", use_tqdm=False)
        values = torch.zeros(*masks.shape, outputs[0].outputs.data.shape[-1])
        for row, real, output in zip(values, masks, outputs, strict=True):
            row[real] = output.outputs.data.float()
        found = {"values": values}
    save_file({key: x.contiguous() for key, x in found.items()}, root / f"{name}.found")
    del llm
    gc.collect()
