"""Run a model block after block over all batches, so that only one block's weights are in memory at a time.

The model's own forward calls the block with all its arguments; the other blocks pass the hidden state on unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions, observed
from linearize.core.errors import UnsupportedModelError
from linearize.core.registry import ReadOnlyValues
from linearize.modeling.model import evaluating
from linearize.modeling.offload import in_memory
from linearize.modeling.weights import BLOCKS

HIDDEN = "hidden_states"
"""Name of a block's first argument."""
Batch = Mapping[str, Tensor]
Forward = Callable[..., Any]


class Chain:
    """The blocks of a model, each of which reads the hidden state that the one before it returned.

    Attributes:
        model: the model.
        blocks: the blocks in the order in which they run.
        hosts: for each block the name of the attention in it that was converted, or None.
    """

    def __init__(
        self, model: PreTrainedModel, forward: Callable[[PreTrainedModel, Batch], object], batch: Batch
    ) -> None:
        """Check, on one row of a batch, that running block after block gives the same numbers.

        Args:
            model: an offloaded converted model.
            forward: runs the model's body on a batch.
            batch: the model's inputs, on its device.

        Raises:
            UnsupportedModelError: if the blocks are not a chain.
        """
        self.model, self.forward, name = model, forward, vars(model)[BLOCKS]
        self.blocks = list(model.get_submodule(name).children())
        hosts = {attention: host for host, attention in linear_attentions(model).items()}
        inside = [[host for layer, host in hosts.items() if layer in set(block.modules())] for block in self.blocks]
        if sum(map(len, inside)) < len(hosts) or any(len(own) > 1 for own in inside):
            raise self._error(f"has converted attentions outside of {name!r}, or several in one block")
        self.hosts = [own[0] if own else None for own in inside]
        # What each block returns after the hidden state; None if it returns that alone.
        self.rest: list[int | None] = [None] * len(self.blocks)
        row = {key: value[:1] for key, value in batch.items()}
        with evaluating(model), torch.no_grad(), observed(model, lambda *call: None):
            whole, hidden = self._probe(row), None
            for number in range(len(self.blocks)):
                with self.loaded(number):
                    hidden = self.run(number, row, hidden)
        if hidden is None or not torch.equal(whole, hidden):
            raise self._error("computes something else block after block")

    def _error(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"stream-blocks: {type(self.model).__name__} {why}, expected a chain in which each block reads only what "
            "the one before it returned; leave --stream-blocks out"
        )

    def _probe(self, row: Batch) -> Tensor:
        """Run the whole model, and return the last block's hidden state."""
        before: list[Tensor] = []
        ran: list[int] = []

        def wrapped(number: int, forward: Forward) -> Forward:
            def call(*args: object, **kwargs: object) -> object:
                given, output = _hidden_of(args, kwargs), forward(*args, **kwargs)
                if ran and given is not before[-1]:
                    raise self._error(f"changes the hidden state between blocks {number - 1} and {number}")
                if isinstance(output, tuple):
                    self.rest[number] = len(output) - 1
                    if any(torch.is_tensor(leaf) for leaf in tree_leaves(output[1:])):
                        raise self._error(f"has blocks that return more than a hidden state (block {number})")
                before[:] = [output[0] if isinstance(output, tuple) else output]
                ran.append(number)
                return output

            return call

        with self._calling(wrapped):
            self.forward(self.model, row)
        if ran != list(range(len(self.blocks))):
            raise self._error(f"runs its blocks in another order ({ran[:8]})")
        return before[-1]

    @contextlib.contextmanager
    def _calling(self, wrap: Callable[[int, Forward], Forward]) -> Iterator[None]:
        """Replace the forward of every block by `wrap(number, forward)`."""
        with contextlib.ExitStack() as undo:
            for number, block in enumerate(self.blocks):
                own = vars(block)
                if "forward" in own:
                    undo.callback(own.__setitem__, "forward", own["forward"])
                else:
                    undo.callback(own.pop, "forward")
                own["forward"] = wrap(number, block.forward)
            yield

    @contextlib.contextmanager
    def loaded(self, number: int) -> Iterator[None]:
        """Keep the weights of a block in memory."""
        with in_memory(self.blocks[number]):
            yield

    def run(self, number: int, batch: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Run one block on a batch.

        Args:
            number: the block's number.
            batch: the model's inputs, on its device.
            hidden: the hidden state [B, T, C] before the block; None for the first block.

        Returns:
            The hidden state after it.
        """
        kept: list[Tensor] = []

        def wrapped(other: int, forward: Forward) -> Forward:
            def passes(*args: object, **kwargs: object) -> object:
                state, rest = _hidden_of(args, kwargs), self.rest[other]
                return state if rest is None else (state, *[None] * rest)

            def runs(*args: object, **kwargs: object) -> object:
                if hidden is not None and args:
                    args = (hidden, *args[1:])
                elif hidden is not None:
                    kwargs[HIDDEN] = hidden
                output = forward(*args, **kwargs)
                kept.append(output[0] if isinstance(output, tuple) else output)
                return output

            return runs if other == number else passes

        with self._calling(wrapped):
            self.forward(self.model, batch)
        return kept[0]

    def run_all(self, batches: Sequence[Batch]) -> None:
        """Run the whole chain on batches, block after block."""
        hidden: list[Tensor | None] = [None] * len(batches)
        for number in range(len(self.blocks)):
            with self.loaded(number):
                hidden = [self.run(number, batch, state) for batch, state in zip(batches, hidden, strict=True)]


def _hidden_of(args: tuple[Any, ...], kwargs: ReadOnlyValues) -> Tensor:
    state: Tensor = args[0] if args else kwargs[HIDDEN]
    return state
