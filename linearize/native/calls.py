"""Call the compiled op: PyTorch's tensors in, PyTorch's tensors out; what autograd needs is in `gradient`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from linearize.kernels.base import MAP_WEIGHTS, MapSpec
from linearize.native.locate import compiled, shipped
from linearize.native.options import Attended, AttendOptions, Gradients
from linearize.native.structures import (
    CALL_SIZE,
    NAMES,
    NO_MEMORY,
    NO_STATES,
    STEEP,
    TYPES,
    Back,
    Learned,
    Maps,
    WindowBack,
    WindowBuffers,
    call,
    given,
    masks,
    packed,
)
from linearize.native.windows import WindowCalls

FUNCTIONS: Mapping[str, type[ctypes.Structure] | None] = {
    "bidirectional": None,
    "causal": None,
    "step": None,
    "features": None,
    "window": WindowBuffers,
    "window_step": WindowBuffers,
    "bidirectional_gradient": Back,
    "causal_gradient": Back,
    "features_gradient": Back,
}
"""The functions of the library, and what they take beside a call."""

OMP_PAUSE_HARD = 2
"""Of OpenMP's `omp_pause_resource_t`."""


class Engine(WindowCalls):
    """The compiled op.

    Attributes:
        path: the library's file.
        parallel: whether it shares torch's threads; otherwise it runs in one.
        pairs: whether the processor multiplies bf16 numbers as they are: see `attend`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        shared = _share_threads()
        self.library = ctypes.CDLL(str(path))
        self.parallel = bool(shared and self.library.linearize_parallel())
        self.pairs = bool(self.library.linearize_pairs())
        sizes = (
            (CALL_SIZE, self.library.linearize_call_size),
            (ctypes.sizeof(Back), self.library.linearize_back_size),
            (ctypes.sizeof(WindowBuffers), self.library.linearize_window_size),
            (ctypes.sizeof(WindowBack), self.library.linearize_window_back_size),
        )
        for mine, theirs in sizes:
            theirs.restype = ctypes.c_int64
            if theirs() != mine:
                raise OSError(f"{path} was built from other code")
        names = self.library.linearize_names
        names.restype = ctypes.c_char_p
        if names().decode() != NAMES:
            raise OSError(f"{path} was built from other code")
        for name, beside in FUNCTIONS.items():
            function = getattr(self.library, f"linearize_{name}")
            more = [] if beside is None else [ctypes.POINTER(beside)]
            function.argtypes, function.restype = [ctypes.c_char_p, *more], ctypes.c_int
        # On features that are given: without a call.
        function = self.library.linearize_window_gradient
        function.argtypes, function.restype = [ctypes.POINTER(WindowBack)], ctypes.c_int

    @property
    def threads(self) -> int:
        """Return how many threads a call takes."""
        return torch.get_num_threads() if self.parallel else 1

    def supports(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Tell whether it reads such tensors: plain ones on the CPU, of a type it knows, last axis in one piece."""
        return (
            type(q) is Tensor
            and q.is_cpu
            and q.dtype == k.dtype
            and q.dtype in TYPES
            and v.dtype in TYPES
            and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        )

    def pack(self, maps: Sequence[MapSpec], scale: float, learned: Sequence[Learned] = ()) -> Maps:
        """Describe maps and log-scales for `step` and `window_step`: see `linearize.native.structures.packed`."""
        return packed(maps, scale, learned)

    def supports_step(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, log_scale: Tensor) -> bool:
        """Tell whether it reads such tensors and can write into such a state."""
        plain = kv.is_contiguous() and log_scale.is_contiguous() and kv.dtype == log_scale.dtype == torch.float32
        return plain and self.supports(q, k, v)

    def attend(
        self,
        maps: Sequence[MapSpec],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: AttendOptions,
        start: Sequence[Tensor] | None = None,
    ) -> Attended:
        """Attend: q [B, H, T, D], k [B, K, T, D], v [B, K, T, V] -> [B, H, T, V] in v's type.

        Of bf16 inputs with an even D, projections round their weights to bf16 too, as the layers around the attention
        have theirs, where the processor multiplies such numbers at twice the speed. All sums are fp32.

        Args:
            maps: of keys and queries; one where they share it; none where q and k are features already.
            q: queries.
            k: keys.
            v: values.
            options: how to attend.
            start: the state before: kv [B, K, F, V + 1] and log-scale [B, K]; causal only.

        Returns:
            Output, and kv and log-scale of the state after.

        Raises:
            MemoryError: if there is no memory for a thread's tile.
        """
        batch, heads, tokens, _ = q.shape
        ready = _ready(maps, q, options)
        # Tokens first in memory: that is how the host goes on with it.
        out = v.new_empty(batch, tokens, heads, v.shape[3]).transpose(1, 2)
        kv = torch.empty(batch, k.shape[1], ready.features, v.shape[3] + 1)
        log_scale = torch.empty(batch, k.shape[1])
        before = [None, None] if start is None else [x.contiguous() for x in start]
        extra = (*masks(q, k, options), *before, kv, log_scale)
        function = self.library.linearize_causal if options.causal else self.library.linearize_bidirectional
        if function(call(ready, q, k, v, out, extra, (options.eps, self.threads, options.exact))):
            raise MemoryError("native op: no memory for a tile")
        return Attended(out, kv, log_scale)

    def gradients(
        self,
        maps: Sequence[MapSpec],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attended: Attended,
        grad: Tensor,
        options: AttendOptions,
    ) -> Gradients | None:
        """Return the gradients of `attend` without a state before.

        Args:
            maps: of keys and queries; one where they share it; none where q and k are features.
            q: queries.
            k: keys.
            v: values.
            attended: what `attend` returned.
            grad: the gradient to its output [B, H, T, V].
            options: as given to `attend`; weights are left as they are in any case.

        Returns:
            None where log-scales climb by more than 40 powers of two within 48 causal tokens: PyTorch's ops do that.

        Raises:
            MemoryError: if there is no memory for a thread's tiles.
        """
        grad = grad if grad.stride(-1) == 1 and grad.dtype == v.dtype else grad.to(v.dtype).contiguous()
        back = Back(grad=grad.data_ptr(), **{name: x.data_ptr() for name, x in attended._asdict().items()})
        back.grad_stride = grad.stride()[:3]
        found = [torch.empty_like(x) for x in (q, k, v)]
        for name, x in zip("qkv", found, strict=True):
            setattr(back, f"d{name}", x.data_ptr())
            setattr(back, f"d{name}_stride", x.stride()[:3])
        scales = None if options.log_scale is None else torch.empty(k.shape[:3])
        back.dlog_scale = None if scales is None else scales.data_ptr()
        all_buffers = [
            _gradient_buffers(map, x, back, to) for map, x, to in zip(maps, (k, q), ("", "q_"), strict=False)
        ]
        library, ready, extra = (
            self.library,
            _ready(maps, q, options),
            (*masks(q, k, options), *NO_STATES),
        )
        function = library.linearize_causal_gradient if options.causal else library.linearize_bidirectional_gradient
        result = function(call(ready, q, k, v, attended.out, extra, (options.eps, self.threads, True)), back)
        if result == NO_MEMORY:
            raise MemoryError("native op: no memory for a tile's gradients")
        if result == STEEP:
            return None
        weights = [_summed(map, buffers) for map, buffers in zip(maps, all_buffers, strict=True)]
        return Gradients(found[0], found[1], found[2], tuple(itertools.chain(*weights)), scales)

    def step(
        self,
        maps: Maps,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Sequence[Tensor],
        *,
        eps: float,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from one more token, T = 1, and add it to the state (kv, log-scale) in the state's own memory.

        Projections are rounded as in `attend`. `maps` come from `pack`, once for many steps.

        Shapes: q [B, H, 1, D], k [B, K, 1, D], v [B, K, 1, V] -> [B, H, 1, V] in v's type.
        """
        out = v.new_empty(q.size(0), q.size(1), 1, v.size(3))
        mask = None if mask is None else mask.to(torch.bool).contiguous()
        if self.library.linearize_step(
            call(maps, q, k, v, out, (mask, None, None, None, None, *state), (eps, self.threads, False))
        ):
            raise MemoryError("native op: no memory for a step")
        return out

    def features(self, map: MapSpec, x: Tensor, *, scale: float) -> tuple[Tensor, Tensor | None]:
        """Map x [B, K, T, D] -> features [B, K, T, F] and log-scales [B, K, T], None where the map has none; fp32.

        Raises:
            MemoryError: if there is no memory for a thread's tile.
        """
        ready = packed([map], scale)
        phi = torch.empty(*x.shape[:3], ready.features)
        top = torch.empty(x.shape[:3]) if map.scaled else None
        extra = (*[None] * 6, top)
        if self.library.linearize_features(call(ready, x, x, x, phi, extra, (0.0, self.threads, True))):
            raise MemoryError("native op: no memory for a tile")
        return phi, top

    def features_gradient(
        self, map: MapSpec, x: Tensor, grad: Tensor, grad_scale: Tensor | None, *, scale: float
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return the gradients of `features` to x and to the map's `MAP_WEIGHTS` from those to what it returned.

        Raises:
            MemoryError: if there is no memory for a thread's tiles.
        """
        ready = packed([map], scale)
        grad, found = grad.float().contiguous(), torch.empty_like(x)
        back = Back(grad=grad.data_ptr(), dk=found.data_ptr())
        back.grad_stride, back.dk_stride = grad.stride()[:3], found.stride()[:3]
        if grad_scale is not None:
            grad_scale = grad_scale.float().contiguous()
            back.dlog_scale = grad_scale.data_ptr()
        buffers = _gradient_buffers(map, x, back)
        data = call(ready, x, x, x, x, (None, None, None, *NO_STATES), (0.0, self.threads, True))
        if self.library.linearize_features_gradient(data, back):
            raise MemoryError("native op: no memory for a tile's gradients")
        return found, _summed(map, buffers)


def _ready(maps: Sequence[MapSpec], q: Tensor, options: AttendOptions) -> Maps:
    """Describe the maps, or given features."""
    return packed(maps, options.scale) if maps else given(q.shape[3])


def _gradient_buffers(map: MapSpec, x: Tensor, back: Back, prefix: str = "") -> list[Tensor | None]:
    """Allocate the gradients of the map's weights, one for each batch entry and head of x [B, H, T, D]."""
    buffers: list[Tensor | None] = []
    for name in MAP_WEIGHTS:
        weight = getattr(map, name)
        buffer = None if weight is None else torch.empty(*x.shape[:2], *weight.shape[1:])
        setattr(back, prefix + name, None if buffer is None else buffer.data_ptr())
        buffers.append(buffer)
    return buffers


def _summed(map: MapSpec, buffers: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Add up what the op left in the buffers: over the batch, and over heads that share weights."""
    shared = map.first.shape[0] == 1
    found = [None if buffer is None else buffer.sum(dim=0) for buffer in buffers]
    return tuple(x.sum(dim=0, keepdim=True) if shared and x is not None else x for x in found)


@functools.lru_cache(maxsize=1)
def _share_threads() -> bool:
    """Make torch's OpenMP library visible to the op, so that both work with the same threads; tell whether it is."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_end_threads)
    for file in _openmp_files():
        try:
            if hasattr(ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL), "GOMP_parallel"):
                return True
        except OSError:
            continue
    return False


def _openmp_files() -> list[str]:
    """Find the OpenMP libraries of this process, torch's first: other packages (scikit-learn) bring their own."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    files = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "libomp" in line}
    return sorted(files, key=lambda file: ("torch" not in file, file))


def _end_threads() -> None:
    """End the idle threads of every OpenMP library before a fork; parent and child start new ones with their next call.

    A child has none of its parent's threads, but OpenMP's list of them: it would wait for them forever, in torch too.
    """
    for file in _openmp_files():
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(file).omp_pause_resource_all(OMP_PAUSE_HARD)


def load() -> Engine | None:
    """Load what was compiled here, or else what came with the package; None where there is neither.

    What is there and must not or cannot be loaded counts as not built, and a warning says why.
    """
    problems = []
    for find in (compiled, shipped):
        try:
            path = find()
            if path is not None:
                return Engine(path)
        except (OSError, AttributeError) as error:
            problems.append(" ".join(str(error).split()))
    if problems:
        warnings.warn(
            f"native op: not used, as if it were not built: {problems[0]}; see: linearize native",
            RuntimeWarning,
            stacklevel=2,
        )
    return None
