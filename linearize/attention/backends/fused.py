"""The backend in Triton, for whole calls on a GPU: map and attention in one pass over the tokens.

The features never exist in memory: every kernel maps the tokens that it reads. Tokens are cut into segments that run in
parallel. Each segment's keys are summed up first; bidirectional queries read the sum of all segments, and causal ones
start from the sum of the segments before theirs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from linearize.attention.backends.eager import NO_FLOOR, NO_WINDOW
from linearize.attention.backends.native import maps_of, unknown_maps
from linearize.attention.call import AttentionCall, MixerState
from linearize.kernels.base import MapSpec
from linearize.ops.state import FLOOR, is_tracing

if TYPE_CHECKING:
    from linearize.attention.feature_map import FeatureMapMixer

SWITCH = "LINEARIZE_TRITON"
"""Environment variable: with 0 the Triton kernels are not used."""

DEVICES = ("cuda",)
"""Types of devices that it runs on. Tests add the CPU, with Triton's interpreter (TRITON_INTERPRET=1)."""

HALVES = {"relu": 1, "softmax_both": 2, "positive_waves": 2}
"""The maps that it knows, by kind, and their features per row of the weights."""

WEIGHTS = ("first", "second", "bias", "magnitude")
"""The tensors of a `MapSpec` that these maps have."""

TYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = 128
"""Largest head and value size and number of rows of a map."""

BLOCK, LEAST, PROGRAMS = 64, 2, 512
"""Tokens of a block, fewest blocks of a segment, and the number of programs to aim at: about four per multiprocessor."""

SMALL = 64 * 64
"""Up to this size of a half of the state, four warps compute a block; otherwise eight do. (On an H200, four are 1.6
times as fast at a head size of 64.)"""

STAGES = 1
"""Blocks that are being loaded while another is computed, plus one."""

EXACT = "ieee"
"""Precision of products of fp32 numbers that are not rounded; slow, because tensor cores round."""


class Fused:
    """Whole calls in one pass on a GPU, map included."""

    name, uses_op = "triton", False

    def why_not(self, mixer: FeatureMapMixer, call: AttentionCall) -> str:
        if is_tracing():
            return "a graph is being traced"
        if call.q.device.type not in DEVICES:
            return "it runs only on CUDA"
        if call.q.shape[2] == 1 or call.state is not None:
            return "it cannot start from a state, or has nothing to gain for one token"
        if mixer.window is not None:
            return NO_WINDOW
        if mixer.floor > 0.0:
            return NO_FLOOR
        if torch.is_grad_enabled():
            return "it has no gradient yet"
        if mixer.shape.causal and mixer.key_scale is not None:
            return "it does not support learned log-scales of causal keys"
        if mixer.shape.causal and precision(call.v) == EXACT:
            return "PyTorch's exact fp32 products are faster for causal calls"
        return _unreadable(call) or unknown_maps(mixer) or _unknown_kinds(mixer) or absence()

    def run(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        maps, mask = maps_of(mixer), call.key_padding_mask
        mask = None if mask is None else mask.bool().contiguous()
        factor, shift = _key_factors(mixer, call, mask)
        settings = Settings(
            maps[0].kind, mixer.shape.causal, mixer.input_scale(call.scaling), mixer.eps, call.needs_state
        )
        weights = [getattr(map, name) for map in maps for name in WEIGHTS]
        out, kv = _Attend.apply(settings, mask, call.q, call.k, call.v, factor, *weights)
        return out, {"kv": kv, "log_scale": shift} if call.needs_state else None


def precision(v: Tensor) -> str:
    """Return the precision of products: that of the values, or TF32 where PyTorch's own products may be TF32."""
    if v.dtype == torch.bfloat16:
        return "bf16"
    rounded = v.dtype == torch.float16 or torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if rounded else EXACT


def _unreadable(call: AttentionCall) -> str:
    """Return why the kernels cannot read the tensors of a call; empty if they can."""
    tensors = (call.q, call.k, call.v)
    if any(type(x) is not Tensor or x.dtype not in TYPES for x in tensors):
        return "it only reads plain tensors in fp32, bf16 or fp16"
    if call.q.shape[2] != call.k.shape[2]:
        return "there are fewer queries than keys"
    return "its heads have at most 128 numbers" if max(call.q.shape[3], call.v.shape[3]) > LARGEST else ""


def _unknown_kinds(mixer: FeatureMapMixer) -> str:
    """Return why the kernels cannot compute the maps of a mixer; empty if they can. Computed once."""
    why = mixer.memory.get("triton.unknown_kinds")
    if why is None:
        known = all(_knows(map) for map in maps_of(mixer))
        why = mixer.memory["triton.unknown_kinds"] = "" if known else "it does not support this kernel's feature map"
    return str(why)


def _knows(map: MapSpec) -> bool:
    plain = map.amplitude == 1.0 and not map.scaled and map.first.shape[1] <= LARGEST
    return map.kind in HALVES and plain


@functools.lru_cache(maxsize=1)
def kernels() -> Any:
    """Return the module of the kernels; None if it or Triton is missing."""
    # Import by name: Triton must not be imported with linearize, and the code in a checkpoint lacks that module.
    try:
        return importlib.import_module("linearize.attention.backends.fused_kernels")
    except ImportError:
        return None


def absence() -> str:
    """Return why the kernels cannot be used at all; empty if they can."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    return "" if kernels() is not None else "Triton is not installed"


def _key_factors(mixer: FeatureMapMixer, call: AttentionCall, mask: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Return the factors [B, K, T] of the keys (None: all 1), and the logarithm [B, K] of what they are divided by."""
    scale = mixer.log_scales(call)[1]
    if scale is None:
        return None, torch.zeros(call.k.shape[:2], device=call.k.device)
    scale = scale if mask is None else scale.masked_fill(~mask[:, None], FLOOR)
    shift = scale.detach().amax(dim=-1)
    return torch.exp(scale - shift[..., None]), shift


class Settings(NamedTuple):
    """What the kernels need to know besides tensors.

    Attributes:
        kind: kind of the maps.
        causal: whether queries see only keys up to their own.
        scale: factor of queries and keys before the map.
        eps: smallest magnitude of a denominator.
        needs_state: whether the state after the tokens is returned.
    """

    kind: str
    causal: bool
    scale: float
    eps: float
    needs_state: bool


class Side(NamedTuple):
    """Queries or keys, as the kernels read them; see fused_kernels.py.

    Attributes:
        x: tokens [B, H, T, D], or [B, K, T, D] for keys.
        y: rows [B, H, T, V] that are added up, likewise.
        a: factors [B, H, T] of the rows, or None.
        b: numbers [B, H, T] that are added up, or None for ones.
        weights: the tensors `WEIGHTS` of the map, in fp32.
        group: number of heads that share a map.
        keys: whether padding is left out.
    """

    x: Tensor
    y: Tensor
    a: Tensor | None
    b: Tensor | None
    weights: list[Tensor | None]
    group: int
    keys: bool


class Cut(NamedTuple):
    """The tokens' segments: their number, and the number of blocks of each."""

    segments: int
    blocks: int


class Launcher:
    """Runs the kernels of one call."""

    def __init__(self, settings: Settings, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, rows: int) -> None:
        self.settings, self.mask, self.kernels = settings, mask, kernels()
        self.batch, self.heads, self.tokens, self.size = q.shape
        self.key_heads, self.width, self.rows = k.shape[1], v.shape[-1], rows
        self.groups = self.heads // self.key_heads
        self.halves = HALVES[settings.kind]
        self.device = q.device
        blocks = -(-self.tokens // BLOCK)
        each = max(LEAST, -(-blocks * self.batch * self.key_heads // PROGRAMS))
        self.cut = Cut(-(-blocks // each), min(each, blocks))
        padded = [max(16, 1 << (x - 1).bit_length()) for x in (rows, self.size, self.width)]
        self.numbers = rows, self.size, self.width
        self.meta = {
            "KIND": settings.kind,
            "HALVES": self.halves,
            "PRECISION": precision(v),
            "BLOCK": BLOCK,
            **dict(zip(("N_", "D_", "V_"), padded, strict=True)),
            "num_warps": 4 if padded[0] * padded[2] <= SMALL else 8,
            "num_stages": STAGES,
        }

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Make the tensors' device the current one, on which Triton launches kernels."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def states(self, count: int, slots: int) -> Tensor:
        """Return memory for states [count, slots, F, V + 1]."""
        return torch.empty(count, slots, self.halves * self.rows, self.width + 1, device=self.device)

    def sums(self, side: Side, order: int) -> Tensor:
        """Sum up a side for every head [B * heads, slots, F, V + 1].

        Args:
            side: the side.
            order: 0: one slot with the sum of all tokens. 1: a slot with the sums before each segment, and one with
                the sum of all. -1: the same in the opposite order, from the last segment to the first.
        """
        heads, segments = side.x.shape[1], self.cut.segments
        slots = segments + abs(order)
        states = self.states(self.batch * heads, slots)
        self.kernels.sums[(self.batch * heads, segments)](
            *(side.x, side.y, side.a, side.b, self.mask, *side.weights, states),
            *(*side.x.stride()[:3], *side.y.stride()[:3]),
            *(self.settings.scale, self.tokens, self.cut.blocks, slots, heads, side.group, *self.numbers),
            KEYS=side.keys,
            SCALED=side.a is not None,
            SLOTS=order,
            **self.meta,
        )
        if order == 0:
            return states if segments == 1 else states.sum(dim=1, keepdim=True)
        states[:, 0] = 0.0
        return states.cumsum_(dim=1)

    def attend(self, q: Tensor, weights: list[Tensor | None], keys: Side, states: Tensor, *, save: bool) -> Any:
        """Return the output [B, H, T, V] and, with `save`, the inverse denominators [B, H, T], given the keys' sums."""
        out, inverse = self.tokens_first(self.heads, self.width, keys.y.dtype), None
        if save:
            inverse = torch.empty(self.batch, self.heads, self.tokens, device=self.device)
        group = self.groups if weights is keys.weights else 1
        self.kernels.attend[(self.batch * self.heads, self.cut.segments)](
            *(q, keys.x, keys.y, keys.a, self.mask, *weights, *keys.weights, states, out, inverse),
            *(stride for x in (q, keys.x, keys.y, out) for stride in x.stride()[:3]),
            *(self.settings.scale, self.settings.eps, self.tokens, self.cut.blocks, states.shape[1]),
            *(self.heads, self.groups, group, *self.numbers),
            CAUSAL=self.settings.causal,
            SCALED=keys.a is not None,
            SAVE=save,
            **self.meta,
        )
        return out, inverse

    def tokens_first(self, heads: int, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory [B, heads, T, size] with the tokens first, because that is how the host reads it next."""
        return torch.empty(self.batch, self.tokens, heads, size, device=self.device, dtype=dtype).transpose(1, 2)


def _readable(x: Tensor) -> Tensor:
    """Return x with a contiguous last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _ready(weights: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Return the weights as the kernels read them."""
    return [None if w is None else w.detach().float().contiguous() for w in weights]


class _Attend(torch.autograd.Function):
    """Map and attend; the inputs are the settings, the mask, q, k, v, the keys' factors and the maps' weights."""

    @staticmethod
    def forward(
        ctx: Any, settings: Settings, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        factor, *weights = more
        q, k, v = (_readable(x) for x in (q, k, v))
        assert weights[0] is not None
        launcher = Launcher(settings, mask, q, k, v, weights[0].shape[1])
        key_weights = _ready(tuple(weights[: len(WEIGHTS)]))
        query_weights = _ready(tuple(weights[len(WEIGHTS) :])) or key_weights
        a = None if factor is None else factor.detach().contiguous()
        keys = Side(k, v, a, a, key_weights, 1, keys=True)
        save = any(ctx.needs_input_grad)
        with launcher.on_device():
            if settings.causal and launcher.cut.segments == 1 and not settings.needs_state:
                # There are no keys before the only segment.
                states = launcher.states(k.shape[0] * k.shape[1], 1).zero_()
            else:
                states = launcher.sums(keys, int(settings.causal))
            out, inverse = launcher.attend(q, query_weights, keys, states, save=save)
        kv = None
        if settings.needs_state:
            kv = states[:, -1].unflatten(0, k.shape[:2]).clone()
        return out, kv
