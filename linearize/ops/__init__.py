"""Linear attention as pure functions on tensors: torch only, [B, H, T, D] layout, sums over tokens in fp32."""

from linearize.ops.bidirectional import bidirectional_attention
from linearize.ops.causal import causal_attention
from linearize.ops.naive import kernel_weights, naive_attention
from linearize.ops.recurrent import recurrent_attention
from linearize.ops.state import State, empty_state

__all__ = [
    "State",
    "bidirectional_attention",
    "causal_attention",
    "empty_state",
    "kernel_weights",
    "naive_attention",
    "recurrent_attention",
]
