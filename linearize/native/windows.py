"""Call the compiled op for attention with a softmax window: whole sequences, one token, and the gradient."""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.kernels.base import MapSpec
from linearize.native.options import Attending, AttendOptions, WindowAttended
from linearize.native.structures import Maps, WindowBack, WindowBuffers, call, masks, packed
from linearize.ops import Window

LANES = 16
"""Rows of the gradient's arrays are made a multiple of this: whole vectors of every processor."""


class WindowCalls(abc.ABC):
    """The part of the compiled op that knows windows.

    Attributes:
        library: the loaded library.
    """

    library: ctypes.CDLL

    @property
    @abc.abstractmethod
    def threads(self) -> int:
        """Return how many threads a call takes."""

    @abc.abstractmethod
    def supports_step(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, log_scale: Tensor) -> bool:
        """Tell whether it reads such tensors and can write into such a state."""

    def window(
        self, maps: Sequence[MapSpec], q: Tensor, k: Tensor, v: Tensor, options: AttendOptions, form: Window
    ) -> WindowAttended:
        """Attend with softmax inside a window and for the sinks, and with a kernel outside; shapes as in `attend`.

        Weights are left exact.

        Args:
            maps: of keys and queries; one where they share it.
            q: queries.
            k: keys.
            v: values.
            options: how to attend; its mask has each row's real tokens in front.
            form: the window; with exact keys the options have their priority.

        Returns:
            Output, the state of the tokens that have left the window (causal; otherwise it says nothing), and of every
            row what its weights were taken relative to and their sum.

        Raises:
            MemoryError: if there is no memory for a thread's tile.
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
        if self.library.linearize_window(call(ready, q, k, v, out, extra, (form.eps, self.threads, True)), buffers):
            raise MemoryError("native op: no memory for a tile")
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
            inputs: of the forward.
            grad: [B, H, T, V], the gradient to the output over the row's sum.
            slope: [B, H, T], minus that times the output.
            tops: of the forward.
            real: [B], how many tokens are there; padding lies behind them.
            form: the window.
            until: of the forward.

        Raises:
            MemoryError: if there is no memory for a thread's tiles.
        """
        sizes = [x.shape[-1] for x in inputs]
        given = Attending(*(_whole(x) for x in inputs))
        found = Attending(*(torch.zeros_like(x) for x in given))
        grad, slope, tops = _whole(grad), slope.contiguous(), tops.contiguous()
        real = real.to(torch.int64).contiguous()
        (batch, heads, tokens, size), key_heads = given.q.shape, given.k.shape[1]
        back = WindowBack(batch, heads, key_heads, tokens, size, given.phi_q.shape[3], given.v.shape[3])
        back.window, back.sinks, back.causal, back.threads = form.size, form.sinks, form.causal, self.threads
        for name, tensor in (*given._asdict().items(), ("grad", grad), ("slope", slope), ("top", tops), ("real", real)):
            setattr(back, name, tensor.data_ptr())
        for name, tensor in found._asdict().items():
            setattr(back, f"d{name}", tensor.data_ptr())
        if until is not None:
            back.exact_keys, back.until = form.exact_keys, until.data_ptr()
        if self.library.linearize_window_gradient(back):
            raise MemoryError("native op: no memory for a tile's gradients")
        return Attending(*(x[..., :size] for x, size in zip(found, sizes, strict=True)))

    def supports_window_step(self, q: Tensor, k: Tensor, v: Tensor, state: Mapping[str, Tensor]) -> bool:
        """Tell whether it reads such tensors and can write into such a state of a window."""
        if not self.supports_step(q, k, v, state["kv"], state["log_scale"]):
            return False
        types = {"k": k.dtype, "v": v.dtype, "phi": torch.float32, "scale": torch.float32, "mask": torch.bool}
        return all(
            state[name].is_contiguous() and state[name].dtype == types.get(name.partition("_")[2], torch.int64)
            for name in state
            if name not in ("kv", "log_scale")
        )

    def window_step(
        self,
        maps: Maps,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Mapping[str, Tensor],
        *,
        scaling: float,
        eps: float,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from one more token, T = 1, behind a softmax window, in the memory of the state's tensors.

        Shapes as in `step`; `state` has the fields of `linearize.ops.WindowState`. Weights are left exact. A token of
        padding changes nothing and gets zeros.

        Raises:
            MemoryError: if there is no memory for a token; the state is as it was then.
        """
        out = v.new_empty(q.size(0), q.size(1), 1, v.size(3))
        mask = None if mask is None else mask.to(torch.bool).contiguous()
        ring, sinks, kept = state["ring_mask"], state.get("sink_k"), state.get("kept_mask")
        sizes = (ring.size(1), 0 if sinks is None else sinks.size(2), 0 if kept is None else kept.size(1))
        buffers = WindowBuffers(*sizes, scaling=scaling, causal=True)
        for name, tensor in state.items():
            if name not in ("kv", "log_scale"):
                setattr(buffers, name, tensor.data_ptr())
        before = (mask, None, None, None, None, state["kv"], state["log_scale"])
        if self.library.linearize_window_step(call(maps, q, k, v, out, before, (eps, self.threads, True)), buffers):
            raise MemoryError("native op: no memory for a step")
        return out


def _whole(x: Tensor) -> Tensor:
    """Return x [..., D] in fp32 and in one piece, D filled up with zeros to whole vectors."""
    return F.pad(x.float(), (0, -x.shape[-1] % LANES)).contiguous()
