"""Hold the search for a plan against conversions on one model: its time, its ranking of kernels, its choice of widths.

    python scripts/search_check.py MODEL --dataset texts.jsonl --distill-length 32 --batch-size 8 --holdout 32
    python scripts/search_check.py MODEL --dataset texts.jsonl --parts ranking --kernels hedgehog,flexformer_n,luna,t2r

- time: `linearize search` beside `linearize convert`, all with their default steps, alignment included;
- ranking: each kernel's output error in the search, as a mean over layers, beside that after the whole of stage one;
- widths: F features by effective rank beside F in every layer, the same kernels and steps.

Seconds are given as they passed and as this process computed: on one thread (OMP_NUM_THREADS=1) the second figure
hardly depends on what else the machine does. What is found is printed and written as JSON after every run; what is
converted is thrown away.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from scipy.stats import spearmanr

from linearize.jobs.config import ConvertJob, SearchJob
from linearize.jobs.convert import ConvertResult, convert_checkpoint
from linearize.jobs.search import search_checkpoint
from linearize.kernel_search.result import SearchResult

PARTS = ("time", "ranking", "widths")
KERNELS = "hedgehog,flexformer_n,luna,t2r"
Found = TypeVar("Found")


@dataclass
class Check:
    """What is held against each other.

    Attributes:
        options: of data, device and seed, the same for every job.
        steps: of the search, and of stage one; defaults where left out.
        output: the JSON file.
        found: what was found so far.
    """

    options: dict[str, object]
    steps: Mapping[str, int]
    output: str
    found: dict[str, object] = field(default_factory=dict)

    def search(self, **options: object) -> tuple[SearchResult, dict[str, float]]:
        """Search, costs measured anew, with the seconds that it took."""
        steps = {"steps": self.steps["search_steps"]} if "search_steps" in self.steps else {}
        job = SearchJob.of(**{**self.options, **steps, "memory": False, **options})
        return _timed(lambda: search_checkpoint(job))

    def convert(self, kernel: str, **options: object) -> tuple[ConvertResult, dict[str, float]]:
        """Convert every layer to a kernel, with the seconds that it took."""
        steps = {"distill_steps": self.steps["distill_steps"]} if "distill_steps" in self.steps else {}
        with tempfile.TemporaryDirectory() as folder:
            target = {"output": f"{folder}/converted", "kernel": kernel}
            job = ConvertJob.of(**{**self.options, **steps, **target, **options})
            return _timed(lambda: convert_checkpoint(job))

    def keep(self, name: str, found: object) -> None:
        """Print a finding and write all of them."""
        self.found[name] = found
        print(name, json.dumps(found), flush=True)
        Path(self.output).write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")


def _timed(work: Callable[[], Found]) -> tuple[Found, dict[str, float]]:
    passed, computed = time.perf_counter(), time.process_time()
    made = work()
    return made, {"seconds": time.perf_counter() - passed, "cpu_seconds": time.process_time() - computed}


def run(check: Check, parts: Sequence[str], kernels: Sequence[str], features: int) -> None:
    """Run the parts that were asked for; what two of them need is done once."""
    searched = converted = None
    if "time" in parts or "ranking" in parts:
        searched, took = check.search(remeasure=True)
        counts = {"steps": searched.steps, "plans_tried": searched.tried}
        check.keep("search", took | counts | {"output_error": _errors(searched)})
    if "time" in parts:
        assert searched is not None
        converted, whole = check.convert(kernels[0])
        assert converted.distillation is not None and converted.alignment is not None
        steps = {"stage_one_steps": converted.distillation.steps, "alignment_steps": converted.alignment.steps}
        check.keep("conversion", {"kernel": kernels[0], **whole, **steps})
        check.keep("search over conversion", {name: took[name] / whole[name] for name in whole})
    if "ranking" in parts:
        assert searched is not None
        after = {}
        for kernel in kernels:
            if converted is None or kernel != kernels[0]:
                converted, _ = check.convert(kernel, align_steps=0)
            assert converted.distillation is not None
            found = converted.distillation.after
            after[kernel] = [layer.output_error for layer in found.layers]
            check.keep(f"stage one, {kernel}", {"output_error": after[kernel], "mean KL": found.mean("kl")})
        check.keep("ranking", ranking(_errors(searched), after))
    if "widths" in parts:
        check.keep("widths", widths(check, features))


def _errors(searched: SearchResult) -> dict[str, list[float]]:
    """Return each candidate's output error by layer."""
    return {x: [float(str(layer.tried[x]["error"])) for layer in searched.layers] for x in searched.layers[0].tried}


def ranking(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> dict[str, object]:
    """Return how far two tables of errors, by kernel and layer, rank the kernels alike.

    Returns:
        The means over layers, their rank correlation, and that in each layer; None where one table is flat.
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


def widths(check: Check, features: int) -> dict[str, object]:
    """Search two kernels with widths by effective rank and with equal ones; the error of either in every layer."""
    by_rank = ("flexformer_n", "t2r")
    equal = (f"flexformer_n:frequencies={features // 2}", f"t2r:features={features}")
    found: dict[str, object] = {"features": features}
    for name, candidates, more in (("by rank", by_rank, {"widths": features}), ("equal", equal, {})):
        result, took = check.search(candidates=candidates, budget={"cost": 1.0}, swaps=0, **more)
        points = {one.name.removeprefix("the plan, ").removesuffix(" everywhere"): one.error for one in result.points}
        errors = _errors(result)
        found[name] = {
            "everywhere": {x: points[x] for x in candidates},
            "mean output error": {x: _mean(errors[x]) for x in candidates},
            "plan": result.points[0].error,
            "ranks": None if result.ranks is None else list(result.ranks.values()),
            **took,
        }
    return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", metavar="MODEL")
    add("--dataset", required=True, metavar="NAME", help="as `linearize convert` takes it")
    add("--distill-length", type=int, help="tokens per row")
    add("--batch-size", type=int, help="rows per step")
    add("--holdout", type=int, help="held-out rows, on which all errors are measured")
    add("--seed", type=int, default=0)
    add("--device", default="cpu")
    add("--search-steps", type=int, help="steps of the searches, where not the default")
    add(
        "--distill-steps",
        type=int,
        help="steps of stage one, where not the default; two fifths as many of the alignment",
    )
    add("--parts", default=",".join(PARTS), help="what to do (%(default)s)")
    add("--kernels", default=KERNELS, help="kernels that are ranked, the first one is converted (%(default)s)")
    add("--features", type=int, default=64, help="F of the widths, a multiple of 16 (%(default)s)")
    add("--output", default="search-check.json", help="JSON file to write (%(default)s)")
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"parts: got {', '.join(sorted(unknown))}, expected some of {','.join(PARTS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Read the options and run."""
    args = parse(argv)
    given = {name: value for name, value in vars(args).items() if value is not None}
    shared = ("model", "dataset", "distill_length", "batch_size", "holdout", "seed", "device")
    options = {name: given[name] for name in shared if name in given}
    steps = {name: given[name] for name in ("search_steps", "distill_steps") if name in given}
    run(Check(options, steps, args.output), args.parts, args.kernels.split(","), args.features)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
