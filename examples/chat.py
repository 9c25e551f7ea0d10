"""Ask a converted language model a question; its state has the same size after a long text as after a short question.

python examples/chat.py ./smollm2-chat "Why is the sky blue?"
python examples/chat.py ./smollm2-chat "What is this about?" --text report.txt
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import linearize  # noqa: F401 - registers converted checkpoints with the Auto classes
from linearize.attention.cache import cache_argument


def main(argv: Sequence[str] | None = None) -> str:
    """Print the number of tokens, the size of the state and the answer; return the answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a converted checkpoint")
    parser.add_argument("question")
    parser.add_argument("--text", help="a file to read before the question")
    parser.add_argument("--tokens", type=int, default=60, help="maximum number of tokens in the answer")
    args = parser.parse_args(argv)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    text = "" if args.text is None else Path(args.text).read_text(encoding="utf-8") + "\n\n"
    prompt = text + args.question
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompt, return_tensors="pt")
    cache = model.new_cache()
    given = cache_argument(model, cache)
    out = model.generate(**inputs, **given, max_new_tokens=args.tokens, do_sample=False)
    answer = str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()
    print(f"{out.shape[1]:,} tokens, a state of {cache.nbytes() / 2**20:.1f} MiB: {answer}")
    return answer


if __name__ == "__main__":
    main()
