"""Calls of the compiled op: PyTorch's tensors in, PyTorch's tensors out. Autograd is in `native.gradient`.

The code saved in checkpoints calls `load` and the methods of `Engine`, so their names and arguments must not change.
All methods raise MemoryError if there is no memory for a thread's buffers.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from ctypes import byref
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.attention.native import structures
from linearize.attention.native.locate import compiled, shipped
from linearize.attention.native.options import Attended, Attending, AttendOptions, Gradients, WindowAttended
from linearize.attention.native.structures import NO_STATES, Back, Maps, WindowBuffers, call, masks, packed
from linearize.kernels.base import MAP_WEIGHTS, MapSpec
from linearize.ops import Mapped, Window
from linearize.ops.window_parts import in_heads

LANES = 16
"""Rows of the window gradient's arrays are padded to a multiple of this, which is whole vectors on every processor."""


class Engine:
    """The compiled op.

    Attributes:
        path: the library's file.
        library: the loaded library.
        parallel: whether it shares torch's threads; otherwise it uses one thread.
        pairs: whether the processor multiplies bf16 numbers directly; `attend` makes use of that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library, self.parallel = structures.open_library(path)
        self.pairs = bool(self.library.linearize_pairs())

    @property
    def threads(self) -> int:
        """Return the number of threads per call."""
        return torch.get_num_threads() if self.parallel else 1

    def supports(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Tell whether it accepts such tensors: plain, on the CPU, in fp32 or bf16, with a contiguous last axis.

        Args:
            q: queries [B, H, T, D].
            k: keys [B, K, T, D].
            v: values [B, K, T, V].
        """
        if type(q) is not Tensor or not q.is_cpu or q.dtype != k.dtype:
            return False
        known = q.dtype in structures.TYPES and v.dtype in structures.TYPES
        return known and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1

    pack = staticmethod(packed)
    """Describe maps and log-scales for `step` and `window_step`."""

    def supports_step(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, log_scale: Tensor) -> bool:
        """Tell whether it accepts such tensors, and can update kv [B, K, F, V + 1] and log_scale [B, K] in place."""
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

        For bf16 inputs with an even D, projections round their weights to bf16 too, like the layers around the
        attention, if the processor multiplies such numbers at twice the speed. All sums are fp32.

        Args:
            maps: the maps of keys and queries, or the single map that they share; empty if q and k are features.
            q: queries.
            k: keys.
            v: values.
            options: how to attend.
            start: the state before the tokens: kv [B, K, F, V + 1] and log-scale [B, K]; causal only.

        Returns:
            Output, and kv and log-scale of the state after the tokens.
        """
        batch, heads, tokens, _ = q.shape
        ready = _ready(maps, q, options)
        # Put tokens first in memory, because that is how the host reads the output next.
        out = v.new_empty(batch, tokens, heads, v.shape[3]).transpose(1, 2)
        kv = torch.empty(batch, k.shape[1], ready.features, v.shape[3] + 1)
        log_scale = torch.empty(batch, k.shape[1])
        before = [None, None] if start is None else [x.contiguous() for x in start]
        extra = (*masks(q, k, options), *before, kv, log_scale)
        name = "causal" if options.causal else "bidirectional"
        self._run(name, call(ready, q, k, v, out, extra, (options.eps, self.threads, options.exact)))
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
        """Return the gradients of `attend` without an initial state.

        Args:
            maps: the maps of keys and queries, or the single map that they share; empty if q and k are features.
            q: queries.
            k: keys.
            v: values.
            attended: the result of `attend`.
            grad: the gradient of its output [B, H, T, V].
            options: those given to `attend`; weights are never rounded.

        Returns:
            The gradients; None if log-scales climb by more than 40 powers of two within 48 causal tokens, which only
            the ops in PyTorch can handle.
        """
        grad = grad if grad.stride(-1) == 1 and grad.dtype == v.dtype else grad.to(v.dtype).contiguous()
        back = Back(grad=grad.data_ptr(), **{name: x.data_ptr() for name, x in attended._asdict().items()})
        back.grad_stride = grad.stride()[:3]
        grads = [torch.empty_like(x) for x in (q, k, v)]
        for name, x in zip("qkv", grads, strict=True):
            setattr(back, f"d{name}", x.data_ptr())
            setattr(back, f"d{name}_stride", x.stride()[:3])
        scales = None if options.log_scale is None else torch.empty(k.shape[:3])
        back.dlog_scale = None if scales is None else scales.data_ptr()
        all_buffers = [
            _gradient_buffers(map, x, back, to) for map, x, to in zip(maps, (k, q), ("", "q_"), strict=False)
        ]
        ready, extra = _ready(maps, q, options), (*masks(q, k, options), *NO_STATES)
        data = call(ready, q, k, v, attended.out, extra, (options.eps, self.threads, True))
        name = "causal_gradient" if options.causal else "bidirectional_gradient"
        if self._run(name, data, byref(back)) == structures.STEEP:
            return None
        weights = [_summed(map, buffers) for map, buffers in zip(maps, all_buffers, strict=True)]
        return Gradients(grads[0], grads[1], grads[2], tuple(itertools.chain(*weights)), scales)

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
        """Attend from one more token, T = 1, and add it to the state (kv, log-scale) in place.

        Projections are rounded as in `attend`. `maps` comes from `pack`, which is called once for many steps.

        Shapes: q [B, H, 1, D], k [B, K, 1, D], v [B, K, 1, V] -> [B, H, 1, V] in v's type.
        """
        out = v.new_empty(q.size(0), q.size(1), 1, v.size(3))
        mask = None if mask is None else mask.to(torch.bool).contiguous()
        extra = (mask, None, None, None, None, *state)
        self._run("step", call(maps, q, k, v, out, extra, (eps, self.threads, False)))
        return out

    def features(self, map: MapSpec, x: Tensor, *, scale: float) -> tuple[Tensor, Tensor | None]:
        """Map x [B, K, T, D] -> features [B, K, T, F] and log-scales [B, K, T] (None if the map has none), in fp32."""
        ready = packed([map], scale)
        phi = torch.empty(*x.shape[:3], ready.features)
        top = torch.empty(x.shape[:3]) if map.scaled else None
        extra = (*[None] * 6, top)
        self._run("features", call(ready, x, x, x, phi, extra, (0.0, self.threads, True)))
        return phi, top

    def features_gradient(
        self, map: MapSpec, x: Tensor, grad: Tensor, grad_scale: Tensor | None, *, scale: float
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return the gradients of x [B, K, T, D] and of the map's `MAP_WEIGHTS`, given those of `features`' results."""
        ready = packed([map], scale)
        grad, grad_x = grad.float().contiguous(), torch.empty_like(x)
        back = Back(grad=grad.data_ptr(), dk=grad_x.data_ptr())
        back.grad_stride, back.dk_stride = grad.stride()[:3], grad_x.stride()[:3]
        if grad_scale is not None:
            grad_scale = grad_scale.float().contiguous()
            back.dlog_scale = grad_scale.data_ptr()
        buffers = _gradient_buffers(map, x, back)
        data = call(ready, x, x, x, x, (None, None, None, *NO_STATES), (0.0, self.threads, True))
        self._run("features_gradient", data, byref(back))
        return grad_x, _summed(map, buffers)

    def window(
        self, maps: Sequence[MapSpec], q: Tensor, k: Tensor, v: Tensor, options: AttendOptions, form: Window
    ) -> WindowAttended:
        """Attend with softmax inside a window and to the sinks, and with a kernel elsewhere; shapes as in `attend`.

        Weights are not rounded.

        Args:
            maps: the maps of keys and queries, or the single map that they share.
            q: queries.
            k: keys.
            v: values.
            options: how to attend; in its mask, padding comes last in each row. With exact keys, `priority` is given.
            form: the window.

        Returns:
            Output, the state of the tokens that have left the window (meaningful if causal), and the level and sum of
            every row's weights.
        """
        batch, heads, tokens, _ = q.shape
        ready = packed(maps, options.scale)
        out = v.new_empty(batch, tokens, heads, v.shape[3]).transpose(1, 2)
        kv, log_scale = torch.zeros(batch, k.shape[1], ready.features, v.shape[3] + 1), torch.zeros(batch, k.shape[1])
        extra = (*masks(q, k, options), None, None, kv, log_scale)
        tops, sums = torch.empty(batch, heads, tokens), torch.empty(batch, heads, tokens)
        buffers = WindowBuffers(form.size, form.sinks, form.exact_keys, scaling=form.scaling, causal=form.causal)
        buffers.tops, buffers.row_sums = tops.data_ptr(), sums.data_ptr()
        priority = until = None
        if options.priority is not None:
            priority = options.priority.float().contiguous()
            until = torch.empty(priority.shape, dtype=torch.int32)
            buffers.priority, buffers.until = priority.data_ptr(), until.data_ptr()
        data = call(ready, q, k, v, out, extra, (form.eps, self.threads, True))
        self._run("window", data, byref(buffers))
        return WindowAttended(out, kv, log_scale, tops, sums, until)

    def window_gradient(
        self,
        inputs: Attending,
        grad: Tensor,
        slope: Tensor,
        tops: Tensor,
        real: Tensor,
        form: Window,
        until: Tensor | None,
    ) -> Attending:
        """Return the gradients of `inputs`.

        Args:
            inputs: inputs of the forward pass.
            grad: [B, H, T, V], the gradient of the output, divided by the row's sum.
            slope: [B, H, T], minus `grad` times the output.
            tops: from the forward pass.
            real: [B], the number of tokens; padding comes after them.
            form: the window.
            until: from the forward pass.
        """
        sizes = [x.shape[-1] for x in inputs]
        given = Attending(*(_whole(x) for x in inputs))
        grads = Attending(*(torch.zeros_like(x) for x in given))
        grad, slope, tops = _whole(grad), slope.contiguous(), tops.contiguous()
        real = real.to(torch.int64).contiguous()
        (batch, heads, tokens, size), key_heads = given.q.shape, given.k.shape[1]
        back = structures.WindowBack(batch, heads, key_heads, tokens, size, given.phi_q.shape[3], given.v.shape[3])
        back.window, back.sinks, back.causal, back.threads = form.size, form.sinks, form.causal, self.threads
        _point(back, given._asdict() | {"grad": grad, "slope": slope, "top": tops, "real": real})
        _point(back, {f"d{name}": x for name, x in grads._asdict().items()})
        if until is not None:
            back.exact_keys, back.until = form.exact_keys, until.data_ptr()
        self._run("window_gradient", byref(back))
        return Attending(*(x[..., :size] for x, size in zip(grads, sizes, strict=True)))

    def routed(
        self, queries: Mapped, keys: Mapped, v: Tensor, real: Tensor, chosen: Tensor, form: Window, near: WindowAttended
    ) -> WindowAttended | None:
        """Give softmax's weights to the keys of the chosen blocks, which have the kernel's in the result of `window`.

        Args:
            queries: queries of H heads, with their features and log-scales.
            keys: keys, the same; padding comes last in each row and is zero.
            v: values [B, K, T, V], zero at padding.
            real: [B], the number of tokens.
            chosen: [B, H, T, n], the result of `linearize.ops.window_parts.choose_blocks`.
            form: the window.
            near: the result of `window`; its sums and tops are overwritten.

        Returns:
            The result with the output [B, H, T, V] in fp32; None if the subtracted weights of a row are so large that
            its difference would be inexact.
        """
        features = [x.phi for x in (queries, keys)]
        if queries.phi.shape[3] == 1 and not queries.phi.any():
            # No kernel: the op has a faster path without features.
            features = [x[..., :0] for x in features]
        inputs = Attending(queries.x.float() * form.scaling, keys.x, v, *features)
        out, inexact = _whole(near.out), torch.zeros(1, dtype=torch.int64)
        scales = {"query_scale": queries.scale(), "key_scale": _longer(keys.scale(), form)}
        rows = {"out": out, "sums": near.sums, "tops": near.tops, "inexact": inexact}
        self._route("routed", inputs, real, chosen, form, scales | rows)
        return None if inexact.item() else near._replace(out=out[..., : v.shape[3]], chosen=chosen)

    def routed_gradient(
        self,
        inputs: Attending,
        grad: Tensor,
        slope: Tensor,
        tops: Tensor,
        real: Tensor,
        form: Window,
        chosen: Tensor,
        grads: Attending,
    ) -> Attending:
        """Add the effect of the chosen blocks to the gradients that `window_gradient` returned for the same arguments.

        `chosen` [B, H, T, n] is from the forward pass.
        """
        given = {"grad": _whole(grad), "slope": slope, "tops": tops}
        more = [torch.zeros_like(_whole(x)) for x in (inputs.q, *(_longer(x, form) for x in inputs[1:3]), inputs.phi_q)]
        more.append(torch.zeros_like(_whole(_longer(inputs.phi_k, form))))
        given |= {f"d{name}": x for name, x in zip(Attending._fields, more, strict=True)}
        self._route("routed_gradient", inputs, real, chosen, form, given)
        return Attending(*(x + y[:, :, : x.shape[2], : x.shape[3]] for x, y in zip(grads, more, strict=True)))

    def _route(
        self, name: str, inputs: Attending, real: Tensor, chosen: Tensor, form: Window, more: dict[str, Tensor]
    ) -> None:
        """Call one of the two functions above, with `more` arrays."""
        longer = [_whole(_longer(x, form)) for x in (inputs.k, inputs.v, inputs.phi_k)]
        tensors = {"q": _whole(inputs.q), "phi_q": _whole(inputs.phi_q)}
        tensors |= dict(zip(("k", "v", "phi_k"), longer, strict=True)) | {"chosen": chosen, "real": real} | more
        tensors = {name: x.contiguous() for name, x in tensors.items()}
        (batch, heads, tokens, slots), blocks = chosen.shape, -(-chosen.shape[2] // form.block_size)
        key_heads, keys, size = tensors["k"].shape[1:]
        sizes = (batch, heads, key_heads, tokens, keys, size, tensors["phi_q"].shape[3], tensors["v"].shape[3])
        data = structures.Routed(*sizes, form.block_size, blocks, slots, form.size, form.sinks)
        _point(data, tensors)
        data.eps, data.causal, data.threads = form.eps, form.causal, self.threads
        self._run(name, byref(data))

    def choose(self, q: Tensor, channels: Tensor, places: Tensor, count: Tensor, form: Window) -> Tensor:
        """Return the blocks that each query looks up, [B, H, R, n], as `linearize.ops.window_parts.choose_blocks` does.

        Shapes: q [B, H, R, D], `channels` [B, K, D, N], `places` [B, R], `count` [B].
        """
        if form.routed_heads:
            return in_heads(self.choose, q, channels, places, count, form)
        channels = channels if channels.dtype in structures.TYPES else channels.float()
        tensors = {"q": q.float(), "channels": channels, "places": places, "count": count}
        tensors = {name: x.contiguous() for name, x in tensors.items()}
        (batch, heads, rows, size), (_, key_heads, _, keys) = q.shape, channels.shape
        blocks = keys // form.block_size
        slots = min(form.blocks, blocks)
        tensors["chosen"] = torch.empty(batch, heads, rows, slots, dtype=torch.int64)
        sizes = (batch, heads, key_heads, rows, blocks, slots, form.block_size, form.size, form.sinks, size, keys)
        data = structures.Choice(*sizes)
        _point(data, tensors)
        data.causal, data.threads, data.type = form.causal, self.threads, structures.TYPES[channels.dtype]
        self._run("choose", byref(data))
        return tensors["chosen"]

    def supports_window_step(self, q: Tensor, k: Tensor, v: Tensor, state: Mapping[str, Tensor]) -> bool:
        """Tell whether it accepts such tensors and can update such a window state in place."""
        if not self.supports_step(q, k, v, state["kv"], state["log_scale"]):
            return False
        types = {"k": k.dtype, "channels": k.dtype, "v": v.dtype, "scale": torch.float32, "mask": torch.bool}
        held = ((name.partition("_")[2] or name, x) for name, x in state.items() if name not in ("kv", "log_scale"))
        return all(x.is_contiguous() and x.dtype == types.get(kind, torch.int64) for kind, x in held)

    def window_step(
        self,
        maps: Maps,
        inputs: tuple[Tensor, Tensor, Tensor],
        state: Mapping[str, Tensor],
        *,
        scaling: float,
        eps: float,
        mask: Tensor | None = None,
        blocks: tuple[int, int] = (0, 0),
        looks: Tensor | None = None,
    ) -> Tensor:
        """Attend from one more token, T = 1, with a softmax window, and update the state's tensors in place.

        Shapes as in `step`; `inputs` are q, k and v, and `state` has the fields of `linearize.ops.WindowState`. Weights
        are not rounded. A padding token changes nothing, and its output is zero. `blocks` are the number and the size
        of the blocks of keys that a query looks up, in the heads where `looks` [H] (bool; None: all) is true; the state
        must have room for one more key then.

        Raises:
            MemoryError: if there is not enough memory; the state is then unchanged.
        """
        q, k, v = inputs
        out = v.new_empty(q.size(0), q.size(1), 1, v.size(3))
        mask = None if mask is None else mask.to(torch.bool).contiguous()
        ring, sinks, kept = state["ring_mask"], state.get("sink_k"), state.get("kept_mask")
        sizes = (ring.size(1), 0 if sinks is None else sinks.size(2), 0 if kept is None else kept.size(1))
        buffers = WindowBuffers(*sizes, scaling=scaling, causal=True)
        _point(buffers, {name: x for name, x in state.items() if name not in ("kv", "log_scale")})
        if blocks[0]:
            buffers.blocks, buffers.block = blocks
            buffers.keys = state["all_k"].size(2)
            buffers.looks = None if looks is None else looks.data_ptr()
        before = (mask, None, None, None, None, state["kv"], state["log_scale"])
        data = call(maps, q, k, v, out, before, (eps, self.threads, True))
        self._run("window_step", data, byref(buffers))
        return out

    def _run(self, name: str, *arguments: object) -> int:
        """Call a function of the library.

        Raises:
            MemoryError: if there was not enough memory for its buffers.
        """
        result: int = getattr(self.library, f"linearize_{name}")(*arguments)
        if result == structures.NO_MEMORY:
            raise MemoryError("native op: no memory for its buffers")
        return result


def _ready(maps: Sequence[MapSpec], q: Tensor, options: AttendOptions) -> Maps:
    """Describe the maps; an empty list means that q and k are features."""
    return packed(maps, options.scale) if maps else structures.given(q.shape[3])


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
    """Add up the buffers' gradients over the batch, and over heads that share weights."""
    shared = map.first.shape[0] == 1
    sums = [None if buffer is None else buffer.sum(dim=0) for buffer in buffers]
    return tuple(x.sum(dim=0, keepdim=True) if shared and x is not None else x for x in sums)


def _point(data: object, tensors: Mapping[str, Tensor]) -> None:
    """Set the fields of a structure to the addresses of tensors, which must outlive the call."""
    for name, tensor in tensors.items():
        setattr(data, name, tensor.data_ptr())


def _longer(x: Tensor, form: Window) -> Tensor:
    """Return keys [B, K, T, D] or their scales [B, K, T] with zeros to the end of the last block and of a vector."""
    return F.pad(x, (*(0, 0) * (x.ndim - 3), 0, -x.shape[2] % form.block_size + LANES))


def _whole(x: Tensor) -> Tensor:
    """Return x [..., D] contiguous in fp32, with D padded with zeros to whole vectors."""
    more = -x.shape[-1] % LANES
    return F.pad(x.float(), (0, more)) if more else x.float().contiguous()


def load() -> Engine | None:
    """Load the library compiled on this machine, or else the package's library; None if there is neither.

    A library that must not or cannot be loaded counts as not built, and a warning says why.
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
        warnings.warn(f"native op: not used: {problems[0]}; see: linearize native", RuntimeWarning, stacklevel=2)
    return None
