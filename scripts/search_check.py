"""Compare the search for a plan with conversions of one model: the time, and the ranking of kernels.

    python scripts/search_check.py MODEL --dataset texts.jsonl --distill-length 32 --batch-size 8 --holdout 32
    python scripts/search_check.py MODEL --dataset texts.jsonl --parts ranking --kernels hedgehog,flexformer_n,luna,t2r

- time: `linearize search` and `linearize convert`, both with their default steps, including the alignment;
- ranking: each kernel's output error in the search, as a mean over layers, and after the whole of stage one.

Both wall time and this process's CPU time are measured: on one thread (OMP_NUM_THREADS=1) the CPU time hardly depends
on other work on the machine. The figures are printed and written as JSON after every run; converted models are deleted.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from unittest import mock

from scipy.stats import spearmanr

from linearize.core.parsing import check_file
from linearize.jobs.config import ConvertJob, SearchJob
from linearize.jobs.convert import ConvertResult, convert_checkpoint
from linearize.jobs.search import search_checkpoint
from linearize.kernel_search.config import CANDIDATES
from linearize.kernel_search.result import SearchResult

PARTS = ("time", "ranking")
KERNELS = "hedgehog,flexformer_n,luna,t2r"
Result = TypeVar("Result")


@dataclass
class Check:
    """The jobs that are compared.

    Attributes:
        options: options for data, device and seed, the same for every job.
        steps: steps of the search and of stage one; the defaults if left out.
        output: the JSON file.
        figures: all figures so far.
    """

    options: dict[str, object]
    steps: Mapping[str, int]
    output: str
    figures: dict[str, object] = field(default_factory=dict)

    def search(self, **options: object) -> tuple[SearchResult, dict[str, float]]:
        """Return the result of a search and its duration."""
        steps = {"steps": self.steps["search_steps"]} if "search_steps" in self.steps else {}
        job = SearchJob.of(**{**self.options, **steps, **options})
        return _timed(lambda: search_checkpoint(job))

    def convert(self, kernel: str, **options: object) -> tuple[ConvertResult, dict[str, float]]:
        """Return the result of converting every layer to a kernel, and its duration."""
        steps = {"distill_steps": self.steps["distill_steps"]} if "distill_steps" in self.steps else {}
        with tempfile.TemporaryDirectory() as folder:
            target = {"output": f"{folder}/converted", "kernel": kernel}
            job = ConvertJob.of(**{**self.options, **steps, **target, **options})
            return _timed(lambda: convert_checkpoint(job))

    def keep(self, name: str, figure: object) -> None:
        """Print a figure and write all of them."""
        self.figures[name] = figure
        print(name, json.dumps(figure), flush=True)
        Path(self.output).write_text(json.dumps(self.figures, indent=1) + "\n", encoding="utf-8")


def _timed(work: Callable[[], Result]) -> tuple[Result, dict[str, float]]:
    passed, computed = time.perf_counter(), time.process_time()
    result = work()
    return result, {"seconds": time.perf_counter() - passed, "cpu_seconds": time.process_time() - computed}


def run(check: Check, parts: Sequence[str], kernels: Sequence[str]) -> None:
    """Run the requested parts; the search and conversion that both parts need run only once."""
    converted = None
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, XDG_CACHE_HOME=cache):
        # With an empty cache, so that costs are measured again.
        searched, took = check.search()
    counts = {"steps": searched.steps, "plans_tried": searched.tried}
    check.keep("search", took | counts | {"output_error": _errors(searched)})
    if "time" in parts:
        converted, whole = check.convert(kernels[0])
        assert converted.distillation is not None and converted.alignment is not None
        steps = {"stage_one_steps": converted.distillation.steps, "alignment_steps": converted.alignment.steps}
        check.keep("conversion", {"kernel": kernels[0], **whole, **steps})
        check.keep("search over conversion", {name: took[name] / whole[name] for name in whole})
    if "ranking" in parts:
        after = {}
        for kernel in kernels:
            if converted is None or kernel != kernels[0]:
                converted, _ = check.convert(kernel, align_steps=0)
            assert converted.distillation is not None
            fidelity = converted.distillation.after
            after[kernel] = [layer.output_error for layer in fidelity.layers]
            check.keep(f"stage one, {kernel}", {"output_error": after[kernel], "mean KL": fidelity.mean("kl")})
        check.keep("ranking", ranking(_errors(searched), after))


def _errors(searched: SearchResult) -> dict[str, list[float]]:
    """Return each candidate's output error by layer."""
    return {x: [float(str(layer.tried[x]["error"])) for layer in searched.layers] for x in searched.layers[0].tried}


def ranking(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> dict[str, object]:
    """Return how similarly two tables of errors, by kernel and layer, rank the kernels.

    Returns:
        The means over layers, their rank correlation, and that of each layer; None where all errors are equal.
    """
    means = {kernel: [_mean(before[kernel]), _mean(after[kernel])] for kernel in after}
    layers = range(len(next(iter(after.values()))))
    each = [_spearman([before[x][n] for x in after], [after[x][n] for x in after]) for n in layers]
    return {
        "in the search, after stage one": means,
        "rank_correlation": _spearman(*zip(*means.values(), strict=True)),
        "rank_correlation_by_layer": each,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _spearman(one: Sequence[float], two: Sequence[float]) -> float | None:
    return float(spearmanr(one, two).statistic) if min(len(set(one)), len(set(two))) > 1 else None


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", metavar="MODEL")
    add("--dataset", required=True, metavar="NAME", help="data set, as for `linearize convert`")
    add("--distill-length", type=int, help="tokens per row")
    add("--batch-size", type=int, help="rows per step")
    add("--holdout", type=int, help="held-out rows that all errors are measured on")
    add("--seed", type=int, default=0)
    add("--device", default="cpu")
    add("--search-steps", type=int, help="steps of the search, by default its own")
    add("--distill-steps", type=int, help="steps of stage one, by default its own; two fifths of it for the alignment")
    add("--parts", default=",".join(PARTS), help="what to do (%(default)s)")
    add("--kernels", default=KERNELS, help="kernels to rank; the first one is converted for its time (%(default)s)")
    add("--output", default="search-check.json", help="JSON file to write (%(default)s)")
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"parts: got {', '.join(sorted(unknown))}, expected some of {','.join(PARTS)}")
    known = [name for name in CANDIDATES if ":" not in name]
    if unknown := set(args.kernels.split(",")) - set(known):
        parser.error(f"kernels: got {', '.join(sorted(unknown))}, expected some of {','.join(known)}")
    check_file(args.output, "--output", (".json",), overwrite=True)
    return args


def main(argv: list[str] | None = None) -> int:
    """Read the options and run."""
    args = parse(argv)
    given = {name: value for name, value in vars(args).items() if value is not None}
    shared = ("model", "dataset", "distill_length", "batch_size", "holdout", "seed", "device")
    options = {name: given[name] for name in shared if name in given}
    steps = {name: given[name] for name in ("search_steps", "distill_steps") if name in given}
    run(Check(options, steps, args.output), args.parts, args.kernels.split(","))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
