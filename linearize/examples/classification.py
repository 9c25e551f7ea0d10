"""Classification with a linear RoBERTa: convert it, tune it on labelled texts, classify with an ordinary pipeline.

    python -m linearize.examples.classification roberta-base reviews.jsonl
    python -m linearize.examples.classification roberta-base reviews.jsonl --distill-steps 2000 --epochs 3

The file has one JSON object per line with the columns `text` and `label`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from linearize.finetune.config import TuneConfig
from linearize.finetune.tasks import task
from linearize.jobs.config import ConvertJob
from linearize.jobs.convert import convert_checkpoint
from linearize.jobs.finetune import finetune_checkpoint
from linearize.jobs.task_config import TuneJob


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Run the example and return the metrics of the tuned model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--text", default="text")
    parser.add_argument("--distill-steps", type=int, default=500)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--output", default="classification")
    args = parser.parse_args(argv)
    linear, tuned = Path(args.output, "linear"), Path(args.output, "tuned")

    # Stage one: the kernels learn to imitate softmax on the same texts, without their labels.
    convert_checkpoint(
        ConvertJob.of(
            model=args.model,
            kernel="hedgehog",
            dataset=args.data,
            text_column=args.text,
            distill_steps=args.distill_steps,
            holdout=16,
            batch_size=16,
            output=str(linear),
            overwrite=True,
        )
    )
    # Stage two: the whole model learns the task.
    chosen = task("text-classification", columns=[args.text])
    job = TuneJob(
        str(linear),
        chosen,
        dataset=args.data,
        output=str(tuned),
        overwrite=True,
        tune=TuneConfig(epochs=args.epochs, batch_size=16),
    )
    _, result = finetune_checkpoint(job)
    print(f"validation: {result.metrics}")

    # What comes out is an ordinary checkpoint.
    from transformers import pipeline

    classify = pipeline("text-classification", model=str(tuned), device="cpu")
    print(classify("A long film, and not one minute too long."))
    return result.metrics


if __name__ == "__main__":
    main()
