"""For classifiers of long documents: does a model that reads whole documents beat one that truncates them?

    python examples/long_documents.py bert-base-uncased contracts.jsonl --max-length 8192
    python examples/long_documents.py ./my-classifier contracts.jsonl --text body --label outcome --output contracts

The data is a file with columns, a data set from the Hub, or a folder with one file per split. Both models are tuned
with the same options; the original truncates documents at its own length, and is also measured in chunks. The last
line is a prediction of the linear model. An interrupted run continues with --resume.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from linearize.core.events import Event, Noted, Started
from linearize.jobs.longdoc import LongdocResult, run_longdoc
from linearize.jobs.task_config import LongdocJob


def main(argv: Sequence[str] | None = None) -> LongdocResult:
    """Run the example and return the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--text", default="text", help="column of the document")
    parser.add_argument("--label", default="label", help="column of its class")
    parser.add_argument("--max-length", type=int, default=4096, help="tokens that the linear model should read")
    parser.add_argument("--distill-steps", type=int, default=1000)
    parser.add_argument("--align-steps", type=int, default=400)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--output", default="long-documents")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)

    job = LongdocJob.of(
        model=args.model,
        task="text-classification",
        columns=(args.text,),
        label_column=args.label,
        dataset=args.data,
        max_length=args.max_length,
        distill_steps=args.distill_steps,
        align_steps=args.align_steps,
        epochs=args.epochs,
        memory=False,
        output=args.output,
        overwrite=not args.resume,
        resume=args.resume,
    )
    result = run_longdoc(job, say)
    for side, cost in zip(result.sides, result.times.sides, strict=True):
        low, high = side.interval or (side.score, side.score)
        costs = f"{side.cut_share or 0:.0%} cut, {cost.seconds:.3f} s per document"
        print(f"{side.name:<40}{side.score:6.1f} ({low:.1f} to {high:.1f}), {costs}")
    for difference in result.differences:
        print(difference.sentence)
    print(result.verdict)
    print(serve(f"{args.output}/linear"))
    return result


def say(event: Event) -> None:
    """Print the steps as they start, and notes."""
    if isinstance(event, Started):
        print(f"... {event.what}", flush=True)
    elif isinstance(event, Noted):
        print(event.text, flush=True)


def serve(folder: str) -> list[dict[str, Any]]:
    """Predict as a service would: the folder is an ordinary checkpoint whose tokenizer has the new length."""
    from transformers import pipeline

    classify = pipeline("text-classification", model=folder, truncation=True, device="cpu")
    answers: list[dict[str, Any]] = classify("Both parties agree to the terms stated above. " * 200)
    return answers


if __name__ == "__main__":
    main()
