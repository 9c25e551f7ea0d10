"""For language models: convert GPT-2, whose cache becomes a state of constant size instead of all past tokens.

python examples/generation.py gpt2 --prompt "Linear attention is"
python examples/generation.py gpt2 --dataset corpus.txt --distill-steps 5000
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from linearize.jobs.config import ConvertJob
from linearize.jobs.convert import convert_checkpoint


def main(argv: Sequence[str] | None = None) -> str:
    """Run the example and return the text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", default="The history of the city begins with")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--dataset")
    parser.add_argument("--distill-steps", type=int, default=500)
    parser.add_argument("--output", default="generation")
    args = parser.parse_args(argv)

    convert_checkpoint(
        ConvertJob.of(
            model=args.model,
            kernel="hedgehog",
            # Softmax for the nearest tokens, the kernel for everything further away.
            window=128,
            dataset=args.dataset,
            distill_steps=args.distill_steps,
            packing=True,
            holdout=16,
            batch_size=8,
            output=args.output,
            overwrite=True,
        )
    )

    from transformers import AutoModelForCausalLM, AutoTokenizer

    import linearize  # noqa: F401 - registers converted checkpoints with the Auto classes

    tokenizer = AutoTokenizer.from_pretrained(args.output)
    model = AutoModelForCausalLM.from_pretrained(args.output).eval()
    inputs = tokenizer(args.prompt, return_tensors="pt")
    torch.manual_seed(0)
    output = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=True, top_p=0.9, pad_token_id=0)
    text = str(tokenizer.decode(output[0], skip_special_tokens=True))
    print(text)
    return text


if __name__ == "__main__":
    main()
