"""Our causal op compared with a public C++ op on given features, fast-transformers' `CausalLinearAttention`.

Paper: Katharopoulos et al. 2020, "Transformers are RNNs", https://arxiv.org/abs/2006.16236. Installing the package
`pytorch-fast-transformers` compiles it; it is optional, and measured if it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor

from linearize.attention.backends.causal import attend_causally
from linearize.core.errors import ConfigError
from linearize.evaluation.bench.meter import Call
from linearize.evaluation.bench.suites import SizedSuite

PACKAGE = "fast_transformers"
LEAST = 1e-6
"""The constant that the public op adds to a row's sum."""


def installed() -> bool:
    """Tell whether the public op is installed."""
    return find_spec(PACKAGE) is not None


@dataclass(frozen=True)
class PublicOpSuite(SizedSuite):
    """Causal attention on given features, forward pass.

    Attributes:
        features: number of features F.
    """

    name: ClassVar[str] = "public-op"
    variants: ClassVar[tuple[str, ...]] = ("fast-transformers", "linear")
    pair: ClassVar[tuple[str, str]] = ("fast-transformers", "linear")
    memory_variants: ClassVar[tuple[str, ...]] = ("fast-transformers", "linear")

    features: int = 128

    @property
    def what(self) -> str:
        return f"given features of size {self.features}, causal, next to fast-transformers, {self.sizes.dtype}"

    def check(self) -> None:
        if not installed():
            raise ConfigError(f"bench: got no package {PACKAGE}; pip install pytorch-fast-transformers")

    @torch.no_grad()
    def prepare(self, variant: str, tokens: int) -> Call:
        v = self.sizes.inputs(tokens)[2]
        phi_q, phi_k = (self.sizes.draw(tokens, self.features, seed=seed).abs() for seed in (3, 4))
        attend: Callable[..., object] = attend_causally if variant == "linear" else public_attention
        if variant != "linear":
            # The public op copies non-contiguous inputs, and copies should not be timed here.
            v = v.contiguous()
        return torch.no_grad()(lambda: attend(phi_q, phi_k, v))


def public_attention(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    """Same as `CausalLinearAttention`: phi_q, phi_k [B, H, T, F], v [B, H, T, V] -> [B, H, T, V]."""
    from fast_transformers.causal_product import causal_dot_product

    total = torch.einsum("bhtf,bhtf->bht", phi_q, phi_k.cumsum(dim=2)) + LEAST
    return causal_dot_product(phi_q, phi_k, v) / total[..., None]
