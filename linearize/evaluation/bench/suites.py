"""Suites: a computation that can be done in several ways, at any length; here attention on random inputs."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linearize.attention.call import AttentionCall
from linearize.attention.factory import build_mixer
from linearize.attention.mixer import Mixer
from linearize.attention.shape import HeadShape
from linearize.core.registry import PLAIN, Hybrid
from linearize.evaluation.bench.meter import DTYPES, Call
from linearize.evaluation.bench.rows import Row

PREFILL = 16
"""Tokens that are read to fill the state, whose size does not depend on their number."""


class Suite(abc.ABC):
    """A computation that can be done in several ways, at any length. Suites are frozen dataclasses that can be pickled.

    Attributes:
        name: name of the suite.
        variants: the ways to compute it.
        pair: the two variants that are compared: the reference, and ours.
        memory_variants: the variants whose memory is measured.
        may_run_out_of_memory: the variants that are tried in a separate process first, even if memory is not measured.
        calls: how often each variant is called in a row in each turn.
        counts_prepared: whether memory includes the results of `prepare` (caches, states), not only the call.
        note: a caveat for readers of the figures, or None; available after `check`.
    """

    name: ClassVar[str]
    variants: ClassVar[tuple[str, ...]] = ("softmax", "linear")
    pair: ClassVar[tuple[str, str]] = ("softmax", "linear")
    memory_variants: ClassVar[tuple[str, ...]] = ("softmax", "linear")
    may_run_out_of_memory: ClassVar[tuple[str, ...]] = ()
    calls: ClassVar[int] = 1
    counts_prepared: ClassVar[bool] = False

    @property
    def note(self) -> str | None:
        return None

    @property
    @abc.abstractmethod
    def what(self) -> str:
        """Full description of the measurement, unique to this suite."""

    @property
    @abc.abstractmethod
    def device(self) -> str:
        """Device that it runs on."""

    @abc.abstractmethod
    def prepare(self, variant: str, tokens: int) -> Call:
        """Make inputs of this length, or this context, and return the call."""

    @abc.abstractmethod
    def check(self) -> None:
        """Check that everything can be measured, before measuring starts.

        Raises:
            LinearizeError: a subclass of it, if something cannot be measured.
        """

    def lengths(self, asked: Sequence[int]) -> Sequence[int]:
        """Return the lengths to measure at."""
        return asked

    def figures(self, row: Row) -> Mapping[str, float | None]:
        """Return further figures derived from a row."""
        return {}


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes and kernel of an attention layer with random inputs.

    Attributes:
        kernel: name of the kernel.
        kernel_args: its arguments.
        hybrid: window, sinks, exact keys and scale in addition to the kernel.
        heads: number of query heads H, by default also of key and value heads.
        head_dim: head size D.
        batch: batch size B.
        dtype: dtype of the inputs.
        device: device that it runs on.
        key_heads: number of key and value heads K; None: H.
        value_dim: size V of a value; None: D.
    """

    kernel: str = "hedgehog"
    kernel_args: Mapping[str, object] = field(default_factory=dict)
    hybrid: Hybrid = PLAIN
    heads: int = 12
    head_dim: int = 64
    batch: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    key_heads: int | None = None
    value_dim: int | None = None

    def mixer(self, *, causal: bool) -> Mixer:
        """Build the kernel's mixer with its initial weights.

        Raises:
            ConfigError: if the kernel does not fit these sizes.
        """
        mixer = self.empty_mixer(causal=causal)
        mixer.reset_parameters(torch.Generator().manual_seed(0))
        return mixer.eval().to(self.device)

    def empty_mixer(self, *, causal: bool) -> Mixer:
        """Build the kernel's mixer with uninitialised weights."""
        key_heads, value_dim = self.key_heads or self.heads, self.value_dim or self.head_dim
        shape = HeadShape(self.heads, key_heads, self.head_dim, value_dim, causal)
        return build_mixer(self.kernel, self.kernel_args, shape, self.hybrid)

    def draw(self, tokens: int, size: int | None = None, *, seed: int = 0, heads: int | None = None) -> Tensor:
        """Draw normal numbers [B, H, T, D]; `size` replaces D and `heads` replaces H."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch, heads or self.heads, tokens, size or self.head_dim)
        return torch.randn(shape, generator=generator).to(self.device, DTYPES[self.dtype])

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw q [B, H, T, D], k [B, K, T, D], v [B, K, T, V], with each token's heads contiguous, as in models."""
        kinds = ((None, None), (None, self.key_heads), (self.value_dim, self.key_heads))
        q, k, v = (
            self.draw(tokens, size, seed=seed, heads=heads).transpose(1, 2).contiguous().transpose(1, 2)
            for seed, (size, heads) in enumerate(kinds)
        )
        return q, k, v


@dataclass(frozen=True)
class SizedSuite(Suite):
    """A suite that measures attention on random inputs.

    Attributes:
        sizes: sizes and kernel.
    """

    sizes: AttentionSizes = field(default_factory=AttentionSizes)

    @property
    def device(self) -> str:
        return self.sizes.device


@dataclass(frozen=True)
class AttentionSuite(SizedSuite):
    """One attention layer.

    Attributes:
        causal: whether a query sees only keys up to its own position.
        backward: whether the gradients of the inputs and kernel parameters are computed too.
    """

    name: ClassVar[str] = "attention"

    causal: bool = False
    backward: bool = False

    @property
    def how(self) -> str:
        """Direction, passes and dtype, in readable form."""
        direction = "causal" if self.causal else "bidirectional"
        return f"{direction}, {'forward and backward' if self.backward else 'forward'}, {self.sizes.dtype}"

    @property
    def what(self) -> str:
        kernel = self.sizes.kernel + "".join(f" {k}={v}" for k, v in self.sizes.kernel_args.items())
        kernel += "".join(f" {k}={v}" for k, v in self.sizes.hybrid.changed.items())
        return f"{kernel}, {self.how}"

    def check(self) -> None:
        self.sizes.mixer(causal=self.causal)

    def prepare(self, variant: str, tokens: int) -> Call:
        q, k, v = self.sizes.inputs(tokens)
        if variant == "softmax":
            grouped = self.sizes.key_heads not in (None, self.sizes.heads)
            attend = partial(F.scaled_dot_product_attention, is_causal=self.causal, enable_gqa=grouped)
            return self.call(attend, [q, k, v], [])
        mixer = self.sizes.mixer(causal=self.causal)
        scaling = self.sizes.head_dim**-0.5
        return self.call(lambda q, k, v: mixer(AttentionCall(q, k, v, scaling))[0], [q, k, v], list(mixer.parameters()))

    def call(
        self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], parameters: list[nn.Parameter]
    ) -> Call:
        """Return a call that runs the forward pass of `attend` on q, k and v, or forward and backward."""
        if not self.backward:
            return torch.no_grad()(lambda: attend(*inputs))
        wanted = [x.requires_grad_() for x in [*inputs, *parameters]]
        gradient = torch.ones_like(inputs[2])
        return lambda: torch.autograd.grad(attend(*inputs), wanted, gradient, allow_unused=True)
