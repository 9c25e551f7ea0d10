"""Compare rules for the state that stage two keeps: the score of each rule's state on rows that chose nothing.

    python scripts/state_choice.py MODEL --data FOLDER --output state-choice.json

FOLDER has one folder per task, as for recipes. Tasks and seeds that the output already has are skipped.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import EvalPrediction

from linearize.checkpoint.loading import load_processor
from linearize.core.parsing import check_file
from linearize.training.stage_two import tuner
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.load import load_for_task
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.tasks import task
from linearize.training.stage_two.trainer import finetune

JOBS: dict[str, tuple[str, DataOptions, int]] = {
    "cola": ("cola", DataOptions(limit=3000, max_length=48), 5),
    "mrpc": ("mrpc", DataOptions(limit=1200, max_length=96), 6),
    "sst2": ("sst2", DataOptions(limit=1000, max_length=64, validation_limit=600), 5),
    "imdb": ("text-classification", DataOptions(limit=600, max_length=128, validation_limit=500), 6),
}
"""Task, rows and epochs, by folder: few rows, where rules differ most."""
Evaluation = dict[str, float]


def lowest(figure: str) -> Callable[[Sequence[Evaluation]], Evaluation]:
    """Return the rule that keeps the lowest figure."""
    return lambda found: min(found, key=lambda entry: entry[figure])


def within_error(found: Sequence[Evaluation]) -> Evaluation:
    """Return the latest evaluation within one standard error of the lowest calibrated loss."""
    best = min(found, key=lambda entry: entry["calibrated"])
    return [entry for entry in found if entry["calibrated"] <= best["calibrated"] + best["error"]][-1]


RULES: dict[str, Callable[[Sequence[Evaluation]], Evaluation]] = {
    "lowest loss": lowest("loss"),
    "lowest calibrated loss": lowest("calibrated"),
    "latest within one standard error": within_error,
    "last": lambda found: found[-1],
    "best of all, unknown in practice": lambda found: max(found, key=lambda entry: entry["score"]),
}


def run(model_name: str, data: str, name: str, seed: int) -> dict[str, Any]:
    """Tune one model and return its evaluations, and the score of each rule."""
    kind, shape, epochs = JOBS[name]
    wanted = task(kind, columns=("text",), label="label") if kind == "text-classification" else task(kind)
    rows = prepare(wanted, load_processor(model_name, "text"), shape, data=str(Path(data) / name))
    found: list[Evaluation] = []
    excess: list[float] = []
    own = tuner.losses_of

    def losses_of(prediction: EvalPrediction) -> dict[str, float]:
        losses = own(prediction)
        excess.append(losses["excess"])
        return losses

    def on_log(entry: dict[str, float]) -> None:
        known = [0, *(one["step"] for one in found)]
        if "eval_selection" in entry and "eval_score" in entry and entry["step"] not in known:
            calibrated, error = entry["eval_selection"], entry["eval_selection_error"]
            figures = {"loss": calibrated + excess[-1], "calibrated": calibrated, "error": error}
            found.append({"step": entry["step"], **figures, "score": entry["eval_score"]})

    torch.manual_seed(seed)
    model = load_for_task(model_name, rows)
    config = TuneConfig(
        learning_rate=1e-4,
        batch_size=16,
        epochs=epochs,
        eval_batch_size=64,
        seed=seed,
        warmup=0.1,
        group_by_length=True,
    )
    tuner.losses_of = losses_of
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = finetune(model, rows, config, folder=folder, on_log=on_log)
    finally:
        tuner.losses_of = own
    scores = {rule: choose(found)["score"] for rule, choose in RULES.items()}
    kept = {"held_out": result.selection["rows"], "kept": result.best_step}
    return {"task": name, "seed": seed, **kept, "scores": scores, "evaluations": found}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or Hub name of a softmax or converted encoder without a head")
    parser.add_argument("--data", required=True, help=f"folder with the folders {', '.join(JOBS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    args = parser.parse_args(words)
    check_file(str(args.output), "--output", (".json",), overwrite=True)
    return args


def main(words: list[str] | None = None) -> None:
    """Run all tasks and seeds, and write the file after each."""
    args = parse(words)
    runs = json.loads(args.output.read_text())["runs"] if args.output.exists() else []
    for seed in args.seeds:
        for name in JOBS:
            if (name, seed) in [(done["task"], done["seed"]) for done in runs]:
                continue
            runs.append(run(args.model, args.data, name, seed))
            print(name, seed, runs[-1]["scores"], flush=True)
            means = {rule: round(fmean(done["scores"][rule] for done in runs), 4) for rule in RULES}
            args.output.write_text(json.dumps({"means": means, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
