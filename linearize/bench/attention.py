"""The attention of one layer on made-up inputs: softmax through SDPA beside a kernel, or beside the bare op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linearize.attention.backends.choose import attend_causally
from linearize.attention.call import AttentionCall
from linearize.attention.factory import build_mixer
from linearize.attention.mixer import Mixer
from linearize.attention.shape import HeadShape
from linearize.bench.machine import DTYPES
from linearize.bench.rows import Row, ratio
from linearize.bench.suite import Suite
from linearize.bench.timing import Call
from linearize.errors import ConfigError
from linearize.ops import bidirectional_attention
from linearize.registry import PLAIN, Hybrid


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes and kernel of a made-up attention.

    Attributes:
        kernel: name of the kernel.
        kernel_args: its arguments.
        hybrid: what the attention has in addition to the kernel.
        heads: heads H of the queries, and unless said of keys and values.
        head_dim: size D of a head.
        key_heads: heads of keys and values; None: as many as of queries.
        value_dim: size V of a value; None: that of a head.
        batch: sequences B.
        dtype: type of the inputs.
        device: where it runs.
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

    def __post_init__(self) -> None:
        if isinstance(self.hybrid, dict):
            # As plain data, from another process.
            object.__setattr__(self, "hybrid", Hybrid.of(self.hybrid))

    def mixer(self, *, causal: bool) -> Mixer:
        """Build the kernel's mixer with its starting values.

        Raises:
            ConfigError: if the kernel does not fit these sizes.
        """
        mixer = self.empty_mixer(causal=causal)
        mixer.reset_parameters(torch.Generator().manual_seed(0))
        return mixer.eval().to(self.device)

    def empty_mixer(self, *, causal: bool) -> Mixer:
        """Build it without values."""
        shape = HeadShape(
            self.heads, self.key_heads or self.heads, self.head_dim, self.value_dim or self.head_dim, causal
        )
        return build_mixer(self.kernel, self.kernel_args, shape, self.hybrid)

    def draw(self, tokens: int, size: int | None = None, *, seed: int = 0, heads: int | None = None) -> Tensor:
        """Make up normal numbers [B, H, T, D], or of another size than D, or of other heads."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch, heads or self.heads, tokens, size or self.head_dim)
        return torch.randn(shape, generator=generator).to(self.device, DTYPES[self.dtype])

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Make up q [B, H, T, D], k [B, K, T, D], v [B, K, T, V] as models do: the heads of a token side by side."""
        kinds = ((None, None), (None, self.key_heads), (self.value_dim, self.key_heads))
        one, two, three = (
            self.draw(tokens, size, seed=seed, heads=heads).transpose(1, 2).contiguous().transpose(1, 2)
            for seed, (size, heads) in enumerate(kinds)
        )
        return one, two, three

    def check_sizes(self) -> None:
        """Refuse sizes that are none.

        Raises:
            ConfigError: naming the size.
        """
        for name, value in (("batch", self.batch), ("heads", self.heads), ("head-dim", self.head_dim)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
                raise ConfigError(f"{name}: got {value!r}, expected a whole number from 1 to 65536")


@dataclass(frozen=True)
class SizedSuite(Suite):
    """A suite of made-up attentions.

    Attributes:
        sizes: of the attention, and the kernel; as plain data where it comes from another process.
    """

    sizes: AttentionSizes = field(default_factory=AttentionSizes)

    def __post_init__(self) -> None:
        if isinstance(self.sizes, dict):
            object.__setattr__(self, "sizes", AttentionSizes(**self.sizes))

    @property
    def device(self) -> str:
        """See `Suite`."""
        return self.sizes.device

    @property
    def dtype(self) -> str:
        """See `Suite`."""
        return self.sizes.dtype


@dataclass(frozen=True)
class AttentionSuite(SizedSuite):
    """One attention.

    Attributes:
        causal: whether a query sees only keys up to its own position.
        backward: whether the gradients are taken too, of inputs and kernel parameters.
        features: F of given features, so that the bare op is measured without the kernel's map; None: with the map.
    """

    name: ClassVar[str] = "attention"

    causal: bool = False
    backward: bool = False
    features: int | None = None

    @property
    def what(self) -> str:
        """See `Suite`."""
        kernel = self.sizes.kernel + "".join(f" {k}={v}" for k, v in self.sizes.kernel_args.items())
        kernel += "".join(f" {k}={v}" for k, v in self.sizes.hybrid.changed.items())
        means = kernel if self.features is None else f"given features of size {self.features}"
        direction = "causal" if self.causal else "bidirectional"
        passes = "forward and backward" if self.backward else "forward"
        return f"{means}, {direction}, {passes}, {self.sizes.dtype}"

    def check(self) -> None:
        """See `Suite`."""
        self.sizes.check_sizes()
        if self.features is None:
            self.sizes.mixer(causal=self.causal)
        elif not 1 <= self.features <= 65536:
            raise ConfigError(f"features: got {self.features}, expected a whole number from 1 to 65536")

    def prepare(self, variant: str, tokens: int) -> Call:
        """See `Suite`."""
        q, k, v = self.sizes.inputs(tokens)
        if variant == "softmax":
            grouped = self.sizes.key_heads not in (None, self.sizes.heads)
            attend = partial(F.scaled_dot_product_attention, is_causal=self.causal, enable_gqa=grouped)
            return self._call(attend, [q, k, v], [])
        if self.features is not None:
            phi_q, phi_k = (self.sizes.draw(tokens, self.features, seed=seed).abs() for seed in (3, 4))
            op = attend_causally if self.causal else _attend_bidirectionally
            return self._call(op, [phi_q, phi_k, v], [])
        mixer = self.sizes.mixer(causal=self.causal)
        scaling = self.sizes.head_dim**-0.5

        def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return mixer(AttentionCall(q, k, v, scaling))[0]

        return self._call(mix, [q, k, v], list(mixer.parameters()))

    def _call(
        self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], parameters: list[nn.Parameter]
    ) -> Call:
        if not self.backward:
            return torch.no_grad()(lambda: attend(*inputs))
        wanted = [x.requires_grad_() for x in [*inputs, *parameters]]
        gradient = torch.ones_like(inputs[2])

        def both() -> object:
            return torch.autograd.grad(attend(*inputs), wanted, gradient, allow_unused=True)

        return both

    def products(self, variant: str, tokens: int) -> float | None:
        """Count floating-point operations of the matrix products; None for mixers without features.

        Softmax's two products, halved where causal. The linear form's two with one column more for the denominator,
        and the products of the map with its per-head matrices [H, F, D] for queries and keys. The backward pass counts
        twice the forward one.
        """
        size, passes = self.sizes.head_dim, 3.0 if self.backward else 1.0
        rows = 2.0 * self.sizes.batch * self.sizes.heads * tokens * passes
        if variant == "softmax":
            return rows * 2 * size * tokens * (0.5 if self.causal else 1.0)
        features, projected = self.features, 0
        if features is None:
            with torch.device("meta"):
                mixer = self.sizes.empty_mixer(causal=self.causal)
            if mixer.info.feature_dim is None:
                return None
            features = mixer.info.feature_dim(mixer.config, size)
            matrices = [*mixer.parameters(), *mixer.buffers()]
            projected = sum(m.shape[1] for m in matrices if m.ndim == 3 and m.shape[2] == size)
            projected *= 2 if getattr(mixer.config, "tied", True) else 1
        return rows * (2 * features * (size + 1) + projected * size)

    def figures(self, row: Row, rate: float) -> dict[str, float | None]:
        """See `Suite`: share of the machine's matrix products per second that each variant reaches."""
        found: dict[str, float | None] = {}
        for variant in self.variants:
            products = self.products(variant, row.tokens)
            least = None if products is None or not rate else products / rate
            found[f"{variant}_operations"] = products
            found[f"{variant}_share_of_bound"] = ratio(least, row.seconds(variant))
        return found


def _attend_bidirectionally(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    return bidirectional_attention(phi_q, phi_k, v)[0]
