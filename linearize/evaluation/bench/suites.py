"""Suites: something that can be computed in several ways, at any length; here attentions on made-up inputs."""

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
"""Tokens that make the state: its size does not depend on how many there were."""


class Suite(abc.ABC):
    """Something that can be computed in several ways, at any length. Suites are frozen dataclasses that can be pickled.

    Attributes:
        name: of the kind.
        variants: the ways.
        pair: the two of them that are compared: the reference, and ours.
        memory_variants: the ways whose memory is measured.
        may_run_out_of_memory: the ways that are tried in a separate process first, even if memory is not measured.
        calls: of one variant in a row, in each turn.
        counts_prepared: whether memory counts what `prepare` makes (caches, states), and not only what a call needs.
        note: what a reader of its figures must know, or None; available after `check`.
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
        """What is measured, in full: no two suites have the same text."""

    @property
    @abc.abstractmethod
    def device(self) -> str:
        """Where it runs."""

    @property
    @abc.abstractmethod
    def dtype(self) -> str:
        """Type of the numbers."""

    @abc.abstractmethod
    def prepare(self, variant: str, tokens: int) -> Call:
        """Make the inputs of a length, or of a context, and return the call."""

    @abc.abstractmethod
    def check(self) -> None:
        """Refuse what cannot be measured, before anything is.

        Raises:
            LinearizeError: one of its children.
        """

    def lengths(self, asked: Sequence[int]) -> Sequence[int]:
        """Return the lengths at which it is measured."""
        return asked

    def figures(self, row: Row) -> Mapping[str, float | None]:
        """Derive further figures of a row."""
        return {}


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes and kernel of a made-up attention.

    Attributes:
        kernel: name of the kernel.
        kernel_args: its arguments.
        hybrid: what the attention has in addition to the kernel.
        heads: heads H of the queries, and by default of keys and values.
        head_dim: size D of a head.
        batch: sequences B.
        dtype: type of the inputs.
        device: where it runs.
        key_heads: heads K of keys and values; None: as many as of queries.
        value_dim: size V of a value; None: that of a head.
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
        """Build the kernel's mixer with its starting values.

        Raises:
            ConfigError: if the kernel does not fit these sizes.
        """
        mixer = self.empty_mixer(causal=causal)
        mixer.reset_parameters(torch.Generator().manual_seed(0))
        return mixer.eval().to(self.device)

    def empty_mixer(self, *, causal: bool) -> Mixer:
        """Build the kernel's mixer without values."""
        key_heads, value_dim = self.key_heads or self.heads, self.value_dim or self.head_dim
        shape = HeadShape(self.heads, key_heads, self.head_dim, value_dim, causal)
        return build_mixer(self.kernel, self.kernel_args, shape, self.hybrid)

    def draw(self, tokens: int, size: int | None = None, *, seed: int = 0, heads: int | None = None) -> Tensor:
        """Draw normal numbers [B, H, T, D], with another size than D or other heads if they are given."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch, heads or self.heads, tokens, size or self.head_dim)
        return torch.randn(shape, generator=generator).to(self.device, DTYPES[self.dtype])

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw q [B, H, T, D], k [B, K, T, D], v [B, K, T, V], laid out as models do: a token's heads side by side."""
        kinds = ((None, None), (None, self.key_heads), (self.value_dim, self.key_heads))
        q, k, v = (
            self.draw(tokens, size, seed=seed, heads=heads).transpose(1, 2).contiguous().transpose(1, 2)
            for seed, (size, heads) in enumerate(kinds)
        )
        return q, k, v


@dataclass(frozen=True)
class SizedSuite(Suite):
    """A suite of made-up attentions.

    Attributes:
        sizes: of the attention, and the kernel.
    """

    sizes: AttentionSizes = field(default_factory=AttentionSizes)

    @property
    def device(self) -> str:
        return self.sizes.device

    @property
    def dtype(self) -> str:
        return self.sizes.dtype


@dataclass(frozen=True)
class AttentionSuite(SizedSuite):
    """One attention.

    Attributes:
        causal: whether a query sees only keys up to its own position.
        backward: whether the gradients of inputs and kernel parameters are computed too.
    """

    name: ClassVar[str] = "attention"

    causal: bool = False
    backward: bool = False

    @property
    def how(self) -> str:
        """Direction, passes and type, for people."""
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
        """Return the forward, or forward and backward, of `attend` on three inputs."""
        if not self.backward:
            return torch.no_grad()(lambda: attend(*inputs))
        wanted = [x.requires_grad_() for x in [*inputs, *parameters]]
        gradient = torch.ones_like(inputs[2])
        return lambda: torch.autograd.grad(attend(*inputs), wanted, gradient, allow_unused=True)
