"""Stage one, block after block, for a model whose blocks stay in their files: one block's weights are in memory.

With the teacher's hidden states, a layer's kernel depends on no other kernel: losses, gradient norms, AdamW and the
start of the scales are all per layer. So each block does all its steps on the same rows, whose hidden states lie on
disk, and gets the numbers of a run of the whole model to the bit. The draws of `query_sample` are repeated for all
layers. The best step and early stopping depend on the mean over the layers: every block keeps its kernel at each
evaluation, and `loop.py` chooses when all are done.

The folder of states has one folder per finished block; an interrupted run continues with the next one.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from safetensors.torch import load_file, save_file
from torch import Tensor

from linearize.attention.interface import observed
from linearize.checkpoint.fingerprint import check_same
from linearize.checkpoint.output import atomic_folder, free_disk
from linearize.core.errors import CheckpointError, ConfigError
from linearize.core.parsing import MOST_TEXT, read_json
from linearize.fidelity.teacher import Batch, frozen_output
from linearize.modeling.chain import Chain
from linearize.training.processes import autocast, several
from linearize.training.run import tokens_in
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_one.observer import KernelTrainer, LayerLoss
from linearize.training.stage_one.start import ROWS, has_zero_scales, start_scales
from linearize.training.states import RECORD, TENSORS, StateFolder, unreadable_state

HIDDEN = "hidden state"
"""Name of the hidden state in a file of rows; no model has an input of that name."""
START, HELD_OUT, TRAIN = "start", "held-out", "train"
"""Kinds of rows: those that the scales start from, the held-out batches and the training batches."""
FOLDER = "rows"


@dataclass
class BlockRecord:
    """What one block's steps gave; empty for a block without a kernel that learns.

    Attributes:
        losses: the layer's loss per step.
        held_out: its held-out loss at each evaluation, by step; 0 is the start.
        rates: the learning rate per step.
        seconds: seconds since the block's start, per step.
        tokens: tokens read since then, per step (`training.run.tokens_in`).
    """

    losses: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def read_rows(folder: Path, kind: str) -> Iterator[dict[str, Tensor]]:
    """Return the batches of a kind in their order, with the hidden states before a block."""
    for number in itertools.count():
        path = folder / f"{kind}-{number}.safetensors"
        if not path.is_file():
            return
        yield load_file(path)


class BlockTrainer(KernelTrainer):
    """Trains the kernel of one block, on rows that hold the hidden state before it.

    Attributes:
        output: the hidden state after the block, of the last pass.
        after: folder for the rows with the hidden state after the block; None if no block follows.
        written: number of training batches there.
    """

    after: Path | None = None
    written = 0

    def __init__(
        self,
        chain: Chain,
        number: int,
        layers: Sequence[LayerLoss],
        config: DistillConfig,
        accelerator: Accelerator,
    ) -> None:
        self.chain, self.number = chain, number
        self.place = next((i for i, loss in enumerate(layers) if loss.name == chain.hosts[number]), None)
        self.count = len(layers)
        super().__init__(chain.model, [] if self.place is None else [layers[self.place]], config, accelerator)

    def run_frozen(self, batch: Batch, observe: Callable[..., Tensor | None]) -> None:
        moved = send_to_device(dict(batch), self.accelerator.device, non_blocking=True)
        hidden = moved.pop(HIDDEN, None)
        with torch.no_grad(), observed(self.model, observe), autocast(self.accelerator, self.config.precision):
            self.output = self.chain.run(self.number, moved, hidden)

    def _pass(self, batch: Batch, *, train: bool) -> None:
        super()._pass(batch, train=train)
        if train:
            self.write(TRAIN, self.written, batch)
            self.written += 1

    def write(self, kind: str, number: int, batch: Batch) -> None:
        """Write a batch of a kind with the hidden state [B, T, C] of the last pass."""
        if self.after is not None:
            tensors = {**batch, HIDDEN: self.output.cpu()}
            path = self.after / f"{kind}-{number}.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    def draw(self, tokens: int, count: int) -> Tensor:
        """Draw for all layers, as a run of the whole model does, and return this layer's."""
        drawn = [super(BlockTrainer, self).draw(tokens, count) for _ in range(self.count)]
        return drawn[self.place or 0]


def train_blocks(
    chain: Chain,
    layers: Sequence[LayerLoss],
    batches: Callable[[], Iterator[dict[str, Tensor]]],
    held_out: Sequence[dict[str, Tensor]],
    config: DistillConfig,
    accelerator: Accelerator,
    states: StateFolder,
    identity: Mapping[str, object],
    on_step: Callable[[str, int, BlockRecord], None],
) -> list[tuple[LayerLoss, BlockRecord, Path]]:
    """Train the kernels of all blocks; finished ones are read from the folder of states.

    Args:
        chain: the model's blocks.
        layers: the losses of all layers that learn, in the order of the blocks.
        batches: returns the endless training batches, from the first one on.
        held_out: the held-out batches.
        config: options of stage one.
        accelerator: an Accelerate object.
        states: where finished blocks are kept.
        identity: fingerprint of the run.
        on_step: called after every step with the layer's name, the step and the block's record so far.

    Returns:
        For each layer its loss, its record, and the folder with its kernel at each evaluation (`load_kernel`).

    Raises:
        ConfigError: if the run to be resumed was started differently.
        CheckpointError: if the disk has no room for the hidden states.
        TrainingError: if a loss becomes NaN or infinite; the blocks that are finished stay on disk.
    """
    by_name, trained = {loss.name: loss for loss in layers}, []
    last = max(number for number, host in enumerate(chain.hosts) if host in by_name)
    fresh = any(has_zero_scales(loss.layer) for loss in layers)
    done, count = states.blocks(), config.steps * config.gradient_accumulation
    if done < last:
        stored = (count + len(held_out) + fresh) * stored_bytes(chain, next(batches()), config, accelerator)
        # Those before a block stay until those after it are written.
        check_disk(states, (min(2, last) - (done > 0)) * stored)
    for number in range(last + 1):
        path, loss = states.block(number), by_name.get(chain.hosts[number] or "")
        if number < done:
            record = _read(path, identity)
        else:
            rows: dict[str, Iterator[dict[str, Tensor]]]
            before = states.block(number - 1) / FOLDER
            if number:
                rows = {kind: read_rows(before, kind) for kind in (START, HELD_OUT, TRAIN)}
                if (there := len(list(before.glob(f"{TRAIN}-*")))) != count:
                    raise unreadable_state(before.parent, ValueError(f"got {there} batches, expected {count}"))
            else:
                first = ({name: x[:ROWS] for name, x in next(batches()).items()} for _ in range(fresh))
                rows = {START: first, HELD_OUT: iter(held_out), TRAIN: itertools.islice(batches(), count)}
            with atomic_folder(path, overwrite=True) as folder, chain.loaded(number):
                trainer = BlockTrainer(chain, number, layers, config, accelerator)
                if number < last:
                    trainer.after = folder / FOLDER
                    trainer.after.mkdir()
                record = _train_block(trainer, rows, folder, functools.partial(on_step, chain.hosts[number] or ""))
                (folder / RECORD).write_text(json.dumps({**asdict(record), "fingerprint": identity}))
            shutil.rmtree(before, ignore_errors=True)
        if loss is not None:
            trained.append((loss, record, path))
    return trained


def stored_bytes(chain: Chain, batch: Batch, config: DistillConfig, accelerator: Accelerator) -> int:
    """Return the bytes of a batch on disk, with the hidden state after a block."""
    moved, passes = send_to_device(dict(batch), accelerator.device), autocast(accelerator, config.precision)
    with chain.loaded(0), torch.no_grad(), observed(chain.model, frozen_output), passes:
        hidden = chain.run(0, moved, None)
    return hidden.nbytes + sum(tensor.nbytes for tensor in batch.values())


def check_disk(states: StateFolder, needed: int) -> None:
    """Check that the disk has room for hidden states.

    Raises:
        CheckpointError: if there is too little room.
    """
    if needed > (there := free_disk(states.folder)):
        raise CheckpointError(
            f"stream-blocks: the hidden states of all rows need {needed / 1e9:,.3g} GB, but {str(states.folder)!r} is "
            f"on a disk with {there / 1e9:,.3g} GB free; make room, choose another output, or lower --distill-steps"
        )


def _train_block(
    trainer: BlockTrainer,
    rows: Mapping[str, Iterator[dict[str, Tensor]]],
    folder: Path,
    on_step: Callable[[int, BlockRecord], None],
) -> BlockRecord:
    """Do all steps of one block, write its kernel at each evaluation, and all rows with the hidden state after it."""
    config, record, kernels = trainer.config, BlockRecord(), dict[str, Tensor]()
    start, held_out, first = time.perf_counter(), list(rows[HELD_OUT]), list(rows[START])
    only_passed = () if trainer.layers else rows[TRAIN]
    for kind, batches in ((START, first), (HELD_OUT, held_out), (TRAIN, only_passed)):
        for number, batch in enumerate(batches):
            trainer.run_frozen(batch, frozen_output)
            trainer.write(kind, number, batch)
    if not trainer.layers:
        return record

    def evaluate(step: int) -> None:
        record.held_out[step] = trainer.evaluate(held_out, step)
        kernels.update({f"{step}/{name}": tensor for name, tensor in trainer.snapshot().items()})

    seen = 0

    def counted() -> Iterator[dict[str, Tensor]]:
        nonlocal seen
        for batch in rows[TRAIN]:
            seen += tokens_in(batch)
            yield batch

    start_scales(trainer, iter(first), held_out)
    evaluate(0)
    train = counted()
    for step in range(1, config.steps + 1):
        record.rates.append(trainer.step(train, step))
        record.losses.append(trainer.layers[0].mean)
        if step % config.eval_every == 0 or step == config.steps:
            evaluate(step)
        record.seconds.append(time.perf_counter() - start)
        record.tokens.append(seen)
        on_step(step, record)
    save_file({name: tensor.contiguous() for name, tensor in kernels.items()}, folder / TENSORS)
    return record


def _read(path: Path, identity: Mapping[str, object]) -> BlockRecord:
    """Return the record of a finished block."""
    try:
        values = read_json(path / RECORD, MOST_TEXT)
        saved = values.pop("fingerprint")
        values["held_out"] = {int(step): loss for step, loss in values["held_out"].items()}
        record = BlockRecord(**values)
    except Exception as error:
        raise unreadable_state(path, error) from error
    check_same(saved, identity)
    return record


def load_kernel(path: Path, step: int) -> dict[str, Tensor]:
    """Return a block's kernel at an evaluation, by the names of `Trainer.trained`."""
    prefix = f"{step}/"
    try:
        return {k.removeprefix(prefix): x for k, x in load_file(path / TENSORS).items() if k.startswith(prefix)}
    except Exception as error:
        raise unreadable_state(path, error) from error


def check_streamed(config: DistillConfig) -> StateFolder:
    """Return the folder of a streamed run's states.

    Raises:
        ConfigError: if the run has no folder, several processes, or an option that needs the whole model at once.
    """
    if several():
        raise ConfigError("stream-blocks: got several processes, expected one; start it without a launcher")
    if config.feed == "student":
        raise ConfigError(
            "feed: got student, whose layers depend on each other, but blocks are streamed one after the other; "
            "expected teacher: leave --feed out"
        )
    if config.save_every:
        raise ConfigError(
            f"save_every: got {config.save_every}, but a streamed run keeps a state after each block; leave it out"
        )
    if config.folder is None:
        raise ConfigError("stage one: got no folder for the hidden states of streamed blocks; set folder")
    return StateFolder(config.folder, config.keep)


def mean_held_out(records: Sequence[BlockRecord], step: int) -> float:
    """Return the mean held-out loss over the layers at an evaluation."""
    losses = [record.held_out[step] for record in records]
    return sum(losses) / len(losses)
