"""LUNA: learned projections to single numbers, each passed through a bank of learned scalar functions.

Paper: Shahbazi et al. 2025, "LUNA: Linear Universal Neural Attention with Generalization Guarantees",
https://arxiv.org/abs/2512.08061, eq. 11, listing 1, section 5.4.

    phi(x) = h(x) / sqrt(M) [psi_l(w_i . x + b_i)]_{i <= M, l <= L},   psi_l(u) = relu(c_l + v_l . relu(s_l u + t_l))

w: [M, d], b: [M]; psi_l: a scalar MLP 1 -> 64 -> 1 for each channel (or one MLP 1 -> 64 -> L, `shared_mlp`);
M = L = 8, so F = 64. [B, H, T, D] -> [B, H, T, M L], non-negative; l varies fastest, as in the listing. Queries and
keys are unscaled. By default there is no gate h, as in the paper's best variant; `envelope` adds
h(x) = sigmoid(G x + g), one number in [0, 1] per channel. With `shared_heads` all heads of a layer share one set of
parameters, as in listing 1.

Differs from the paper: by default (`start="exp"`) psi_l starts at exp(a_l u), interpolated linearly, with a_l evenly
spaced from -4 to 4, W at random orthogonal rows of length 1/4, and a gate at 1/2. Stage one ends closer to softmax from
there. `start="paper"` draws the initial values of listing 1, except that c starts at 0.5, so that no channel starts out
dead.

psi is piecewise linear in u with one knot per hidden unit, so it is evaluated by looking up the segment: the same
function as the MLP, without its 64 times larger intermediate. The native op does compute the MLP, but in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.core.registry import KernelInfo, option, register_kernel
from linearize.kernels.base import FeatureMap, Features, MapSpec, draw_normal, draw_uniform, orthonormal, project
from linearize.ops.state import is_tracing


@dataclass(frozen=True)
class LunaConfig:
    """Arguments of `luna`."""

    projections: int = option(8, "number M of projections", low=1, high=1024)
    channels: int = option(8, "number L of scalar functions", low=1, high=1024)
    hidden: int = option(64, "hidden units of a scalar MLP", low=1, high=4096)
    shared_heads: bool = option(False, "whether all heads share one set of parameters (listing 1)")
    shared_mlp: bool = option(False, "one MLP 1 -> hidden -> L instead of L MLPs 1 -> hidden -> 1")
    envelope: bool = option(False, "whether each channel is multiplied by a learned gate of the token")
    start: str = option(
        "exp", "initial functions: exponentials of both signs, or random ones as in listing 1", choices=("exp", "paper")
    )
    tied: bool = option(True, "whether queries and keys share one map")

    def numbers(self, head_dim: int) -> int:
        """Count the learnable numbers of one set."""
        mlp = self.hidden * (2 + self.channels) if self.shared_mlp else 3 * self.hidden * self.channels
        gate = self.channels * (head_dim + 1) if self.envelope else 0
        return self.projections * (head_dim + 1) + mlp + self.channels + gate


Segments = tuple[Tensor, Tensor, Tensor]
"""Piecewise linear functions: knots [sets, L, hidden]; slopes and intercepts [sets, L, hidden + 1]."""


SHARPEST = 4.0
"""The largest of the initial rates a_l; the rows of W start short in proportion, so that AdamW turns them quickly."""

REACH = 2.0
"""The initial functions follow the exponential for |u| up to this, and are straight lines beyond it."""


class Luna(FeatureMap):
    """Map [B, H, T, D] -> [B, H, T, M L], non-negative."""

    scale_inputs = False

    def __init__(self, config: LunaConfig, heads: int, head_dim: int) -> None:
        super().__init__(config, 1 if config.shared_heads else heads, head_dim)
        banks = 1 if config.shared_mlp else config.channels
        self.weight = self.add_parameter(config.projections, head_dim)
        self.bias = self.add_parameter(config.projections)
        self.slope = self.add_parameter(banks, config.hidden)
        self.offset = self.add_parameter(banks, config.hidden)
        self.out_weight = self.add_parameter(config.channels, config.hidden)
        self.out_bias = self.add_parameter(config.channels)
        self.gate = self.add_parameter(config.channels, head_dim) if config.envelope else None
        self.gate_bias = self.add_parameter(config.channels) if config.envelope else None
        self._folded: tuple[tuple[Tensor, ...], Segments] | None = None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start at exponentials, or at listing 1: Gaussian projections, PyTorch's defaults for the MLPs."""
        gates = [part for part in (self.gate, self.gate_bias) if part is not None]
        self.bias.zero_()
        if self.config.start == "paper":
            draw_normal(self.weight, generator, self.head_dim**-0.5)
            draw_uniform(self.slope, generator, 1.0)
            draw_uniform(self.offset, generator, 1.0)
            draw_uniform(self.out_weight, generator, self.config.hidden**-0.5)
            self.out_bias.fill_(0.5)
            for part in gates:
                draw_uniform(part, generator, self.head_dim**-0.5)
            return
        # A gate that is not constant would turn the exponentials into other functions.
        for part in gates:
            part.zero_()
        channels, hidden = self.config.channels, self.config.hidden
        rates = SHARPEST * (torch.linspace(-1.0, 1.0, channels) if channels > 1 else torch.ones(1))
        rows = orthonormal(self.heads, self.config.projections, self.head_dim, generator)
        self.weight.copy_(rows / SHARPEST)
        self.out_bias.fill_(1.0)
        # Half of the units are for u > 0, half for u < 0, so that no large numbers cancel each other.
        for sign, units in ((1, slice(hidden // 2, None)), (-1, slice(hidden // 2))):
            count = len(range(hidden)[units])
            knots = torch.linspace(0.0, REACH, count + 1)
            slopes = (sign * rates[:, None] * knots).exp().diff(dim=-1) / knots.diff()
            self.slope[..., units] = sign
            self.offset[..., units] = -knots[:-1]
            self.out_weight[..., units] = slopes.diff(dim=-1, prepend=torch.zeros(channels, 1))[:, :count]

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys by the formula of the module."""
        u = project(x, self.weight) + self.bias.float()[:, None]
        batch, heads, tokens, count = u.shape
        sets = self.heads
        knots, slopes, intercepts = self._segments()
        # One row of numbers per set of parameters and channel: [sets, L, (H / sets) B T M].
        rows = u.transpose(0, 1).reshape(sets, 1, -1).expand(-1, self.config.channels, -1)
        # ONNX has no searchsorted.
        find = _bisect if torch.compiler.is_exporting() else torch.searchsorted
        segment = find(knots, rows.detach().contiguous())
        psi = (slopes.gather(-1, segment) * rows + intercepts.gather(-1, segment)).relu()
        # [B, H, T, M, L].
        psi = psi.reshape(sets, -1, heads // sets, batch, tokens, count).permute(3, 0, 2, 4, 5, 1).flatten(1, 2)
        psi = psi * self.config.projections**-0.5
        if self.gate is not None and self.gate_bias is not None:
            psi = psi * (project(x, self.gate) + self.gate_bias.float()[:, None]).sigmoid()[..., None, :]
        return Features(psi.flatten(-2))

    def map_spec(self) -> MapSpec | None:
        """Describe the map for the native op; None if it lacks this form."""
        if self.gate is not None:
            return None
        shape = (self.heads, self.config.channels, self.config.hidden)
        parts = (self.slope.expand(shape), self.offset.expand(shape), self.out_weight, self.out_bias[..., None])
        amplitude = self.config.projections**-0.5
        return MapSpec("bank", self.weight, bias=self.bias, bank=torch.cat(parts, dim=-1), amplitude=amplitude)

    def _segments(self) -> Segments:
        """Return the segments; on the CPU without a gradient, reuse those of the last call if the weights are equal."""
        numbers = (self.slope, self.offset, self.out_weight, self.out_bias)
        if torch.is_grad_enabled() or is_tracing() or self.slope.device.type != "cpu":
            return self._fold()
        # Compare values, because a tensor's version does not change when `.data` is written.
        if self._folded is None or not all(map(torch.equal, self._folded[0], numbers)):
            self._folded = tuple(x.detach().clone() for x in numbers), self._fold()
        return self._folded[1]

    def _fold(self) -> Segments:
        """Cut each psi, before its ReLU, into linear pieces."""
        shape = (self.heads, self.config.channels, self.config.hidden)
        s, t = self.slope.float().expand(shape), self.offset.float().expand(shape)
        v = self.out_weight.float()
        # A unit with slope zero is always on or always off.
        flat = torch.where(t > 0, torch.inf, -torch.inf)
        knots, order = torch.where(s == 0, flat, -t / s).detach().sort(dim=-1)
        rising = (s > 0).gather(-1, order)

        def table(per_unit: Tensor) -> Tensor:
            """Sum the active units of each segment: rising units left of it, the others right of it."""
            part = per_unit.gather(-1, order)
            on, off = part.masked_fill(~rising, 0.0), part.masked_fill(rising, 0.0)
            on = torch.nn.functional.pad(on.cumsum(dim=-1), (1, 0))
            off = torch.nn.functional.pad(off.flip(-1).cumsum(dim=-1).flip(-1), (0, 1))
            return on + off

        # A NaN unit belongs to every segment, wherever sorting put its knot.
        odd = ((s + t + v).detach() * 0.0).sum(dim=-1, keepdim=True)
        return knots, table(v * s) + odd, table(v * t) + self.out_bias.float()[..., None]


def _bisect(knots: Tensor, u: Tensor) -> Tensor:
    """Return how many of the sorted knots [..., K] are smaller than each u [..., N], as torch.searchsorted does."""
    found, count = torch.zeros_like(u, dtype=torch.long), knots.shape[-1]
    for bit in reversed(range(count.bit_length())):
        more = found + (1 << bit)
        smaller = (more <= count) & (knots.gather(-1, (more - 1).clamp(max=count - 1)) < u)
        found = torch.where(smaller, more, found)
    return found


register_kernel(
    KernelInfo(
        name="luna",
        summary="learned projections passed through a bank of learned scalar MLPs",
        choose="learned features; closest with projections=D channels=2; needs the native op to be fast",
        formula="phi(x) = h(x) [psi_l(w_i.x + b_i)]_{i,l} / sqrt(M), psi_l = relu(MLP 1 -> hidden -> 1), h = 1 | "
        "sigmoid(G x + g)",
        source="Shahbazi et al. 2025 (LUNA), eq. 11, listing 1, section 5.4",
        url="https://arxiv.org/abs/2512.08061",
        config=LunaConfig,
        build=Luna,
        feature_dim=lambda config, d: config.projections * config.channels,
        parameters=lambda config, d: 0 if config.shared_heads else config.numbers(d),
        shared_parameters=lambda config, d: config.numbers(d) if config.shared_heads else 0,
        parameters_formula="M (d + 1) + L (3 hidden + 1)",
        learnable=True,
        positive=True,
    )
)
