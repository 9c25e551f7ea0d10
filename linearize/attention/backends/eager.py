"""PyTorch: map all tokens, then mix them with one of the linear attention ops."""

from __future__ import annotations

from typing import TypedDict, Unpack

from torch import Tensor

from linearize.attention.backends.contract import CausalOp, MappingMixer
from linearize.attention.call import AttentionCall, MixerState, linear_state
from linearize.ops import (
    Floor,
    LinearOp,
    LinearOptions,
    State,
    bidirectional_attention,
    causal_attention,
    floored_attention,
    recurrent_attention,
)


class PyTorchOp:
    """`linearize.ops.causal_attention`. See `contract.CausalOp`."""

    name = "pytorch"

    @property
    def through_states(self) -> PyTorchOp:
        """Its gradient goes through states."""
        return self

    def supports(self, x: Tensor, v: Tensor, *, normalize: bool) -> bool:
        """See `contract.CausalOp`."""
        return True

    def attend(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> tuple[Tensor, State]:
        """See `contract.CausalOp`."""
        return causal_attention(phi_q, phi_k, v, **options)

    def output(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        """See `contract.CausalOp`."""
        return causal_attention(phi_q, phi_k, v, **options)[0]


PYTORCH = PyTorchOp()


class _KeyOptions(TypedDict):
    """The options of an op that say what the keys are."""

    key_padding_mask: Tensor | None
    log_scale: Tensor | None
    initial_state: State | None


class Eager:
    """All tokens at once, around one causal op. See `contract.Backend`."""

    def __init__(self, op: CausalOp) -> None:
        self.op, self.name = op, f"eager, {op.name}"

    def supports(self, mixer: MappingMixer, call: AttentionCall) -> bool:
        """See `contract.Backend`."""
        if mixer.window is not None:
            return False
        if not mixer.shape.causal:
            return self.op is PYTORCH
        return self.op.supports(call.k, call.v, normalize=mixer.keys.normalize and mixer.floor == 0.0)

    def run(self, mixer: MappingMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """See `contract.Backend`."""
        queries, keys = mixer.features(call)
        # In fp32 until the output: sums without a denominator would overflow fp16.
        tensors = queries.phi, keys.phi, call.v.float()
        options: _KeyOptions = {
            "key_padding_mask": call.key_padding_mask,
            "log_scale": keys.log_scale,
            "initial_state": linear_state(call),
        }
        if mixer.floor > 0.0:
            floor = Floor(mixer.floor, mixer.eps)
            out, state = floored_attention(*tensors, floor, op=self._op(mixer, call), **options)
            return mixer.cast_output(out, call.v.dtype), state._asdict() if call.needs_state else None
        normalize, eps = mixer.keys.normalize, mixer.eps
        if not call.needs_state and mixer.shape.causal and call.k.shape[2] > 1:
            out = self.op.output(*tensors, normalize=normalize, eps=eps, **options)
            return mixer.cast_output(out, call.v.dtype), None
        out, state = self._op(mixer, call)(*tensors, normalize=normalize, eps=eps, **options)
        return mixer.cast_output(out, call.v.dtype), state._asdict() if call.needs_state else None

    def _op(self, mixer: MappingMixer, call: AttentionCall) -> LinearOp:
        """Return the op that sums up the values."""
        if not mixer.shape.causal:
            return bidirectional_attention
        return recurrent_attention if call.k.shape[2] == 1 else self.op.attend
