"""Long documents with a linear BERT: give it more positions, convert it, and embed a text of many thousand tokens.

python -m linearize.examples.long_documents sentence-transformers/all-MiniLM-L6-v2 --tokens 16384
python -m linearize.examples.long_documents bert-base-uncased book.txt --tokens 32768
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from linearize.jobs.config import ConvertJob
from linearize.jobs.convert import convert_checkpoint


def main(argv: Sequence[str] | None = None) -> torch.Tensor:
    """Run the example and return the document's embedding [D]."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("document", nargs="?", help="a text file; by default Python's own documentation")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--distill-steps", type=int, default=300)
    parser.add_argument("--output", default="long-documents")
    args = parser.parse_args(argv)

    # Attention is learned on short rows, which are cheap; the kernels then work at any length.
    convert_checkpoint(
        ConvertJob.of(
            model=args.model,
            kernel="hedgehog",
            max_length=args.tokens,
            distill_steps=args.distill_steps,
            distill_length=min(256, args.tokens),
            batch_size=16,
            output=args.output,
            overwrite=True,
        )
    )

    from transformers import AutoModel, AutoTokenizer

    import linearize  # noqa: F401 - makes the Auto classes know converted checkpoints

    tokenizer, model = AutoTokenizer.from_pretrained(args.output), AutoModel.from_pretrained(args.output).eval()
    inputs = tokenizer(read(args.document), return_tensors="pt", truncation=True, max_length=args.tokens)
    start = time.perf_counter()
    with torch.no_grad():
        states = model(**inputs).last_hidden_state[0]
    print(f"{len(states):,} tokens in {time.perf_counter() - start:.1f} s")
    return states.mean(dim=0)


def read(name: str | None) -> str:
    """Read a text file, or Python's manual topics."""
    if name is not None:
        return Path(name).read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    return " ".join(topics[topic] for topic in sorted(topics))


if __name__ == "__main__":
    main()
