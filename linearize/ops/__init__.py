"""Linear attention as pure functions on tensors: torch only, [B, H, T, D] layout, sums over tokens in fp32."""

from linearize.ops.bidirectional import bidirectional_attention, gather_keys, read_state
from linearize.ops.block import Blocks, BlockState, block_attention, block_weights
from linearize.ops.causal import advance, causal_attention, recurrent_attention
from linearize.ops.floored import floored_attention, kernel_weights
from linearize.ops.state import LinearOp, LinearOptions, State, empty_state
from linearize.ops.window import window_attention
from linearize.ops.window_parts import Mapped, Unmapped, Window, WindowState, window_weights

__all__ = [
    "BlockState",
    "Blocks",
    "LinearOp",
    "LinearOptions",
    "Mapped",
    "State",
    "Unmapped",
    "Window",
    "WindowState",
    "advance",
    "bidirectional_attention",
    "block_attention",
    "block_weights",
    "causal_attention",
    "empty_state",
    "floored_attention",
    "gather_keys",
    "kernel_weights",
    "read_state",
    "recurrent_attention",
    "window_attention",
    "window_weights",
]
