"""Measure what two processes under FSDP 2 hold in memory, with weights that stay in their files and with whole ones.

    python scripts/measure_sharded_loading.py --work SCRATCH

SCRATCH gets random Llamas in bf16, shard by shard, and rows of few words. Each way is a run of its own: `convert` with
two steps of stage one, and of the result `align` and `finetune` with two steps of low-rank updates or of all weights.
What counts is the peak of each process over the whole command, from loading to the written result, without Python's and
torch's own memory: a tiny model goes through the same command first. The figures are MB per process. With `--row` one
way is measured in the processes of a launcher.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from measure_stage_one_memory import SIZES, TINY, write_random
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from linearize.evaluation.bench.memory import MALLOC, peak_meter
from linearize.jobs.config import AlignJob, ConvertJob
from linearize.jobs.convert import align_checkpoint, convert_checkpoint
from linearize.jobs.finetune import finetune_checkpoint
from linearize.jobs.task_config import TuneJob
from linearize.modeling import offload
from linearize.training.processes import wait_for_all

CONVERT, ALIGN, ALIGN_LORA = "convert", "align", "align --train lora"
LORA, FULL = "finetune --lora", "finetune"
PARTS, WHOLE = "parts", "whole"
FSDP = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "OMP_NUM_THREADS": "1"}


def prepare(work: Path, name: str) -> None:
    """Write a model with a tokenizer, and rows."""
    if not (work / name).exists():
        write_random(work / name, name)
    words = {word: number for number, word in enumerate(("<pad>", "<unk>", *map(str, range(500))))}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", unk_token="<unk>")
    tokenizer.save_pretrained(work / name)
    rows = [{"text": " ".join(str((7 * row + word) % 500) for word in range(16))} for row in range(40)]
    (work / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def run(work: Path, name: str, verb: str) -> None:
    """Convert a model, or align or tune the converted one."""
    given = {"dataset": str(work / "rows.jsonl"), "device": "cpu", "batch_size": 2, "overwrite": True}
    if verb == CONVERT:
        given |= {"text_column": "text", "holdout": 4, "distill_steps": 2, "distill_length": 16, "align_steps": 0}
        convert_checkpoint(ConvertJob.of(model=str(work / name), output=str(work / f"{name}-linear"), **given))
        return
    if verb in (ALIGN, ALIGN_LORA):
        given |= {"text_column": "text", "holdout": 4, "steps": 2, "blockwise": 0.5, "length": 16, "eval_every": 1}
        given |= {"train": "lora" if verb == ALIGN_LORA else "blocks", "learning_rate": 1e-6}
        align_checkpoint(AlignJob.of(model=str(work / f"{name}-linear"), output=str(work / f"{name}-aligned"), **given))
        return
    given |= {"task": "causal-lm", "max_length": 16, "steps": 2, "eval_every": 2, "selection_rows": 4}
    given |= {"lora": "r=8"} if verb == LORA else {}
    output = str(work / f"{name}-tuned")
    finetune_checkpoint(TuneJob.of(model=str(work / f"{name}-linear"), output=output, **given))


def measure(work: Path, name: str, verb: str, way: str) -> int:
    """Return the peak of a command in this process, in bytes."""
    if way == WHOLE:
        offload.load_in_files = lambda empty, load, device: load()
    run(work, TINY, verb)
    gc.collect()
    start, highest = peak_meter("cpu")
    before = start()
    run(work, name, verb)
    return highest() - before


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--size", default="0.3B", choices=list(SIZES))
    parser.add_argument("--processes", default=2, type=int)
    parser.add_argument("--verbs", default=f"{CONVERT},{ALIGN_LORA},{ALIGN},{LORA},{FULL}")
    parser.add_argument("--ways", default=f"{WHOLE},{PARTS}")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--row", nargs=2, metavar=("VERB", "WAY"))
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    """Measure all ways and print the figures."""
    args = parse(words)
    if args.row:
        torch.set_num_threads(1)
        peak = measure(args.work, args.size, *args.row)
        wait_for_all()
        (args.work / f"peak-{os.environ['RANK']}").write_text(str(peak))
        return
    for name in (TINY, args.size):
        prepare(args.work, name)
    found: dict[str, dict[str, list[float]]] = {}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(args.processes)]
    for verb in args.verbs.split(","):
        for way in args.ways.split(","):
            for left in args.work.glob("*.training"):
                shutil.rmtree(left)
            command = [*launcher, __file__, "--work", str(args.work), "--size", args.size, "--row", verb, way]
            subprocess.run(command, env=os.environ | MALLOC | FSDP, check=True)
            peaks = [int((args.work / f"peak-{rank}").read_text()) / 1e6 for rank in range(args.processes)]
            found.setdefault(verb, {})[way] = [round(peak) for peak in peaks]
            print(f"{verb}, {way}: {' and '.join(f'{peak:,.0f}' for peak in peaks)} MB", flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps({"size": args.size, "MB of each process": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
