"""PyTorch, with softmax inside a window; what lies outside is summed up causally by one of the causal ops."""

from __future__ import annotations

from torch import Tensor

from linearize.attention.backends.contract import CausalOp, MappingMixer
from linearize.attention.backends.eager import PYTORCH
from linearize.attention.call import AttentionCall, MixerState
from linearize.ops import Mapped, WindowState, window_attention


class Windowed:
    """See `contract.Backend`."""

    def __init__(self, op: CausalOp) -> None:
        self.op, self.name = op, f"window, {op.name}"

    def supports(self, mixer: MappingMixer, call: AttentionCall) -> bool:
        """See `contract.Backend`; only causally is there something to sum up for the op."""
        if mixer.window is None:
            return False
        return self.op.supports(call.k, call.v, normalize=False) if mixer.shape.causal else self.op is PYTORCH

    def run(self, mixer: MappingMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """See `contract.Backend`."""
        window = mixer.form(call.scaling)
        assert window is not None
        before = None if call.state is None else WindowState.of(call.state)
        queries, keys = mixer.features(call)
        # In fp32 until the output, as all sums.
        out, state = window_attention(
            Mapped(call.q, *queries),
            Mapped(call.k, *keys),
            call.v,
            window,
            key_padding_mask=call.key_padding_mask,
            initial_state=before,
            op=self.op.attend,
        )
        after = state.present() if call.needs_state and state is not None else None
        return mixer.cast_output(out.float(), call.v.dtype), after
