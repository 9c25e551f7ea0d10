"""Measure the peak memory of stage one on random Llamas in bf16, and compare it with what `linearize.jobs.bill` says.

    python scripts/measure_stage_one_memory.py --work SCRATCH --output docs/results/stage-one-memory.json

SCRATCH gets the checkpoints, shard by shard, and their hidden states. Each run is a process of its own. What counts is
what it adds from the start of loading on, without Python's and torch's own memory: a tiny model goes through the same
steps first, because modules are imported, and threads and workspaces made, with the first step. Loading itself, which
maps files beside the weights, is left out. With `--row` one run is measured in this process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import linearize
from linearize.checkpoint.loading import load_model
from linearize.evaluation.bench.memory import MALLOC, peak_meter
from linearize.jobs.bill import memory_bill
from linearize.jobs.config import ConvertJob
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_one.loop import distill

TINY = "tiny"
SIZES = {
    # Hidden size, MLP, layers, query heads, key heads.
    TINY: (64, 128, 2, 2, 2),
    "0.1B": (768, 2048, 12, 12, 12),
    "0.3B": (1024, 2816, 24, 16, 8),
    "1B": (2048, 5632, 22, 32, 8),
}
STREAMED, RESIDENT = "stage one, streamed", "stage one"


class Batches:
    """Random tokens."""

    def __init__(self, rows: int, tokens: int) -> None:
        self.size = rows, tokens

    def train_batches(self, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(start)
        while True:
            yield {"input_ids": torch.randint(3, 1000, self.size, generator=generator)}

    def holdout_batches(self) -> list[dict[str, Tensor]]:
        return [next(self.train_batches(10**6))]


def write_random(folder: Path, name: str) -> None:
    """Write a random Llama in bf16, one file per layer."""
    size, wide, layers, heads, key_heads = SIZES[name]
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=size, intermediate_size=wide, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    folder.mkdir(parents=True)
    with torch.device("meta"):
        shapes = {key: tensor.shape for key, tensor in LlamaForCausalLM(config).state_dict().items()}
    generator, files = torch.Generator().manual_seed(0), dict[str, list[str]]()
    for key in shapes:
        files.setdefault(key.split(".")[2] if ".layers." in key else "rest", []).append(key)
    index = {}
    for number, keys in enumerate(files.values(), 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {
            key: torch.ones(shapes[key]) if "norm" in key else 0.02 * torch.randn(shapes[key], generator=generator)
            for key in keys
        }
        save_file({key: x.bfloat16() for key, x in tensors.items()}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(keys, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.save_pretrained(folder)


def train(folder: str, way: str, rows: int, tokens: int, loaded: Callable[[], object] = lambda: None) -> None:
    """Convert a model and do two steps; `loaded` is called before the first."""
    model = linearize.convert(load_model(folder, stream=way == STREAMED).model)
    loaded()
    with tempfile.TemporaryDirectory(dir=Path(folder).parent) as states:
        options = {"folder": f"{states}/states"} if way == STREAMED else {}
        distill(model, Batches(rows, tokens), DistillConfig(steps=2, eval_every=2, **options))


def measure(folder: str, way: str, rows: int, tokens: int) -> int:
    """Return the peak of a run in this process, in bytes."""
    train(str(Path(folder).parent / TINY), way, rows, tokens)
    gc.collect()
    start, highest = peak_meter("cpu")
    before = start()
    train(folder, way, rows, tokens, start)
    return highest() - before


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--sizes", default=",".join(name for name in SIZES if name != TINY))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--row", nargs=2, metavar=("FOLDER", "WAY"))
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    """Measure all sizes and write the results."""
    args = parse(words)
    if args.row:
        print(measure(*args.row, args.rows, args.tokens))
        return
    rows, names = [], args.sizes.split(",")
    for name in {TINY, *names}:
        if not (args.work / name).exists():
            write_random(args.work / name, name)
    for name in names:
        folder = args.work / name
        job = ConvertJob.of(model=str(folder), distill_length=args.tokens, batch_size=args.rows)
        bill = {stage.stage: stage.bytes for stage in memory_bill(job, "cpu").stages}
        for way in (RESIDENT, STREAMED):
            size = ["--rows", str(args.rows), "--tokens", str(args.tokens)]
            command = [sys.executable, __file__, "--work", str(args.work), *size, "--row", str(folder), way]
            done = subprocess.run(command, env=os.environ | MALLOC, check=True, capture_output=True, text=True)
            measured = int(done.stdout.split()[-1])
            ratio = bill[way] / measured
            rows.append({"model": name, "way": way, "forecast": bill[way], "measured": measured, "ratio": ratio})
            print(rows[-1], flush=True)
    if args.output:
        facts = {"rows": args.rows, "tokens": args.tokens, "torch": torch.__version__, "results": rows}
        args.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
