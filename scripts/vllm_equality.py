"""Generate greedily in vLLM, and compare every token with the model's own forward pass in transformers.

    python scripts/vllm_equality.py FOLDER --tokens 1000 --requests 1 --generate
    python scripts/vllm_equality.py FOLDER --tokens 1000 --requests 16

FOLDER is a converted checkpoint with a tokenizer; run it in the environment that `make vllm` installs. With several
requests, one arrives every 2 steps, and one more is aborted while the others run. A token is right if it has the
largest logit after the prompt and all tokens before it, or one within 0.001 of that: such a near tie depends on
rounding. It exits with 1 if a token is not right. With --no-check, for an original, only the speed is measured.
With --blocks there is too little memory for all requests, so that some are preempted and read again later. With
--minutes it stops earlier and checks what there is; the same line with --tokens-file continues.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
WORDS = "The history of the lighthouse keeper who wrote letters to the sea begins in a small town."
NEAR_TIE = 1e-3
"""Logits closer than this may change places: vLLM's own layers round in another order."""
APART = 2
"""Steps between two arrivals."""
KEPT = 20
"""Steps between two writes of the tokens file."""


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a converted checkpoint")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens per request")
    parser.add_argument("--requests", type=int, default=1, help="requests, with prompts of different lengths")
    parser.add_argument("--blocks", type=int, help="blocks of vLLM's cache: few of them force preemption")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop generating after this time")
    parser.add_argument("--tokens-file", type=Path, help="JSON file of the new tokens, from which a run continues")
    parser.add_argument("--generate", action="store_true", help="also compare the first request with generate()")
    parser.add_argument("--no-check", action="store_true", help="measure the speed only")
    parser.add_argument("--output", type=Path, help="JSON file to whose list the figures are added")
    return parser.parse_args(words)


def run(
    engine: Any,
    prompts: list[list[int]],
    answers: list[list[int]],
    tokens: int,
    minutes: float = math.inf,
    keep: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Generate after prompts that arrive one by one, and return what the first request needs in memory.

    Args:
        engine: of vLLM.
        prompts: token numbers.
        answers: the tokens after each prompt so far; extended in place.
        tokens: how many each gets.
        minutes: time after which it stops.
        keep: called every `KEPT` steps.
    """
    from vllm import SamplingParams

    scheduler = engine.engine_core.engine_core.scheduler
    cache = scheduler.kv_cache_config
    # Layers in one group have a block each; groups share the memory, so a block takes what the largest group needs.
    block = max(len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in cache.kv_cache_groups)
    greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    used: dict[str, float] = {}
    aborted, steps, end = len(prompts) > 1, 0, time.monotonic() + 60 * minutes
    before = [list(answer) for answer in answers]
    waiting = [i for i, answer in enumerate(answers) if len(answer) < tokens]
    if aborted:
        engine.add_request("aborted", {"prompt_token_ids": prompts[-1]}, SamplingParams(**greedy, max_tokens=tokens))
    while (waiting or engine.has_unfinished_requests()) and time.monotonic() < end:
        if waiting and steps % APART == 0:
            i = waiting.pop(0)
            options = SamplingParams(**greedy, max_tokens=tokens - len(before[i]))
            engine.add_request(str(i), {"prompt_token_ids": prompts[i] + before[i]}, options)
        if aborted and steps == 3 * APART:
            engine.abort_request(["aborted"])
        for output in engine.step():
            if output.request_id != "aborted":
                i = int(output.request_id)
                answers[i][:] = before[i] + list(output.outputs[0].token_ids)
        if len(prompts) == 1 and len(answers[0]) in (1, tokens - 1):
            blocks = round(scheduler.kv_cache_manager.usage * (cache.num_blocks - 1))
            used[f"MiB after {len(prompts[0]) + len(answers[0])} tokens"] = round(blocks * block / 2**20, 1)
        steps += 1
        if steps % KEPT == 0:
            keep()
    keep()
    return used


def check(folder: str, prompts: list[list[int]], answers: list[list[int]], generate: bool) -> dict[str, float]:
    """Return how many tokens have the largest logit, and the largest difference to it."""
    import torch
    from transformers import AutoModelForCausalLM

    import linearize  # noqa: F401

    model, equal, widest = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), 0, torch.zeros(())
    for prompt, answer in zip(prompts, answers, strict=True):
        if not answer:
            continue
        tokens = torch.tensor(answer)
        with torch.no_grad():
            logits = model(torch.cat([torch.tensor(prompt), tokens])[None]).logits[0, len(prompt) - 1 : -1]
        best = logits.max(dim=-1)
        equal += int((best.indices == tokens).sum())
        widest = torch.maximum(widest, (best.values - logits.gather(1, tokens[:, None])[:, 0]).max())
    figures = {"equal": equal, "largest difference of logits": float(widest)}
    if generate:
        given = torch.tensor([prompts[0]])
        options = {"attention_mask": torch.ones_like(given), "eos_token_id": None, "pad_token_id": 0}
        made = model.generate(given, max_new_tokens=len(answers[0]), do_sample=False, **options)[0, given.shape[1] :]
        same = (made == torch.tensor(answers[0])).long().cumprod(0)
        figures["first tokens as generate's"] = int(same.sum())
    return figures


def main(words: list[str] | None = None) -> int:
    """Generate and compare; return 1 if a token is wrong."""
    args = parse(words)
    os.environ.update(SETTINGS)
    from vllm import LLM

    options = {} if args.blocks is None else {"num_gpu_blocks_override": args.blocks}
    llm = LLM(
        args.folder, dtype="float32", enforce_eager=True, max_model_len=2048, max_num_batched_tokens=256,
        disable_log_stats=False, **options,
    )  # fmt: skip
    text, tokenizer = WORDS.split(), llm.get_tokenizer()
    # The prompts of every third request are longer than the 256 tokens that vLLM reads at once.
    prompts = [tokenizer(" ".join(text[i % 7 :] * (1, 4, 25)[i % 3]))["input_ids"] for i in range(args.requests)]
    file: Path | None = args.tokens_file
    answers = json.loads(file.read_text()) if file and file.is_file() else [[] for _ in prompts]

    def keep() -> None:
        if file:
            file.write_text(json.dumps(answers))

    start, used, known = time.perf_counter(), time.process_time(), sum(map(len, answers))
    memory = run(llm.llm_engine, prompts, answers, args.tokens, args.minutes, keep)
    seconds, processor = time.perf_counter() - start, time.process_time() - used
    count = sum(map(len, answers))
    figures: dict[str, Any] = {
        **memory,
        "folder": Path(args.folder).name,
        "requests": args.requests,
        "tokens": count,
        "longest": max(map(len, answers)),
        "tokens per second": round((count - known) / seconds, 2),
        "tokens per second of processor time": round((count - known) / processor, 2),
        "blocks": args.blocks,
        "preemptions": sum(one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions"),
    }
    print(json.dumps(figures, indent=1), flush=True)
    if not args.no_check:
        checked = check(args.folder, prompts, answers, args.generate)
        print(json.dumps(checked, indent=1), flush=True)
        figures |= checked
    if args.output:
        before = json.loads(args.output.read_text()) if args.output.is_file() else []
        args.output.write_text(json.dumps([*before, figures], indent=1) + "\n")
    return int(not figures.get("largest difference of logits", 0.0) <= NEAR_TIE)


if __name__ == "__main__":
    raise SystemExit(main())
