"""Generate greedily in vLLM, and compare every token with the model's own forward pass in transformers.

    python scripts/vllm_equality.py FOLDER --tokens 1000 --requests 1
    python scripts/vllm_equality.py FOLDER --tokens 60 --requests 16

FOLDER is a converted checkpoint with a tokenizer; it runs in the environment that `make vllm` installs. A token counts
as equal if it has the largest logit after the prompt and all tokens before it; otherwise the difference to that logit
is reported. With --no-check, for an original, only the speed is measured.
"""

from __future__ import annotations

import argparse
import os
import time

SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
WORDS = "The history of the lighthouse keeper who wrote letters to the sea begins in a small town."


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a converted checkpoint")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens per request")
    parser.add_argument("--requests", type=int, default=1, help="requests at once, with prompts of different lengths")
    parser.add_argument("--no-check", action="store_true", help="measure the speed only")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Generate and compare; return 1 if a token differs."""
    args = parse(words)
    os.environ.update(SETTINGS)
    from vllm import LLM, SamplingParams

    engine = LLM(args.folder, dtype="float32", enforce_eager=True, max_model_len=2048, max_num_batched_tokens=256)
    text, tokenizer = WORDS.split(), engine.get_tokenizer()
    prompts = [tokenizer(" ".join(text[i % 7 :] * (1 + i % 3)))["input_ids"] for i in range(args.requests)]
    greedy = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, detokenize=False)
    start, used = time.perf_counter(), time.process_time()
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    start, used = time.perf_counter() - start, time.process_time() - used
    count = args.tokens * args.requests
    print(
        f"{count} tokens: {count / start:.1f} per second, {count / used:.1f} per second of processor time", flush=True
    )
    if args.no_check:
        return 0
    import torch
    from transformers import AutoModelForCausalLM

    import linearize  # noqa: F401

    model, equal, widest = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval(), 0, 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor(list(answer.outputs[0].token_ids))
        with torch.no_grad():
            logits = model(torch.cat([torch.tensor(prompt), tokens])[None]).logits[0, len(prompt) - 1 : -1]
        best = logits.max(dim=-1)
        equal += int((best.indices == tokens).sum())
        widest = max(widest, float((best.values - logits.gather(1, tokens[:, None])[:, 0]).max()))
    print(f"{equal} of {count} tokens are those of transformers; the largest difference of logits is {widest:.2g}")
    return int(equal < count)


if __name__ == "__main__":
    raise SystemExit(main())
