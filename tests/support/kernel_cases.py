"""What the generated tests share: every kernel of the registry with its variants, no list by hand."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from linearize.attention.call import AttentionCall
from linearize.attention.factory import build_mixer
from linearize.attention.shape import HeadShape
from linearize.core.errors import ConfigError
from linearize.core.registry import Hybrid, kernel_infos

KERNELS = [info for info in kernel_infos() if info.preset is None and not info.needs_window]
NAMES = [info.name for info in KERNELS]
FAMILIES = {info.build.__bases__[0] if "_" in info.name else info.build: info for info in KERNELS if info.learnable}
"""One kernel of each family that learns: the Macformers, for example, differ in their coefficients only."""
BATCH, HEADS, KEY_HEADS, DIM, WIDTH = 2, 4, 2, 16, 6
WIDTHS = ("features", "frequencies")


def needed(info):
    """Arguments without which the kernel cannot be built."""
    return {"max_positions": 64} if info.maximum_positions else {}


def variants(info):
    """The defaults, and every switch and choice of the kernel turned to its other values, one at a time.

    Numbers of features are beyond the usual one, and no multiple of anything that a fast op could count on.
    """
    found = [needed(info)]
    for field in dataclasses.fields(info.config):
        if isinstance(field.default, bool):
            found.append(needed(info) | {field.name: not field.default})
        if field.name in WIDTHS:
            found.append(needed(info) | {field.name: 3 * DIM - 2})
        for choice in field.metadata.get("choices") or ():
            if choice != field.default:
                found.append(needed(info) | {field.name: choice})
    return found


CASES = [(info, arguments) for info in KERNELS for arguments in variants(info)]
IDS = ["-".join([info.name, *(f"{k}={v}" for k, v in arguments.items())]) for info, arguments in CASES]
DIRECTIONS = ["bidirectional", "causal"]


def directions(info):
    """In which of the two a kernel works."""
    return [name for name in DIRECTIONS if getattr(info, name)]


def make_mixer(
    info,
    arguments=None,
    *,
    causal,
    heads=HEADS,
    key_heads=KEY_HEADS,
    dim=DIM,
    width=WIDTH,
    seed=0,
    **hybrid,
):
    """A ready mixer in evaluation mode."""
    shape = HeadShape(heads, key_heads, dim, width, causal)
    mixer = build_mixer(info.name, needed(info) if arguments is None else arguments, shape, Hybrid(**hybrid))
    mixer.reset_parameters(torch.Generator().manual_seed(seed))
    return mixer.eval()


def make_inputs(tokens, *, batch=BATCH, heads=HEADS, key_heads=KEY_HEADS, dim=DIM, width=WIDTH, seed=0, scale=1.0):
    """Random q, k, v of one call."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count, size):
        return torch.randn(batch, count, tokens, size, generator=generator) * scale

    return draw(heads, dim), draw(key_heads, dim), draw(key_heads, width)


def naive(mixer, q, k, v, mask=None):
    """The output by the written-out weights."""
    weights = mixer.weights(q, k, scaling=DIM**-0.5, key_padding_mask=mask)
    return mixer.apply_output(weights @ v.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)).to(v.dtype)


def run(mixer, q, k, v, mask=None, **kwargs):
    """The output by the fast way, and the state."""
    return mixer(AttentionCall(q, k, v, DIM**-0.5, mask, **kwargs))


@torch.no_grad()
def decode(mixer, q, k, v, mask=None, *, state):
    """One token of generation: as the cache asks for it, so that the state's memory may be written to."""
    return run(mixer, q, k, v, mask, state=state, needs_state=True)


def stepwise(mixer, q, k, v, mask=None, *, prefill=0):
    """The output of decoding: a first run of tokens, then one by one."""
    outputs, state = [], None
    starts = [slice(0, prefill)] if prefill else []
    for part in [*starts, *(slice(i, i + 1) for i in range(prefill, q.shape[2]))]:
        piece = None if mask is None else mask[:, part]
        out, state = run(mixer, q[:, :, part], k[:, :, part], v[:, :, part], piece, state=state, needs_state=True)
        outputs.append(out)
    return torch.cat(outputs, dim=2), state


WITH_ROUTED = {"window": 4, "sinks": 1, "scale": "linear", "routed_blocks": "3:2"}
ADDITIONS = {
    "plain": {},
    "window": {"window": 5},
    "sinks": {"window": 5, "sinks": 3},
    "scales": {"scale": "linear"},
    "scaled window": {"window": 5, "scale": "linear"},
    "exact keys": {"window": 5, "scale": "network", "sinks": 2, "exact_keys": 3},
    "softmax heads": {"softmax_heads": (0, 3)},
    "all of them": {"window": 5, "sinks": 1, "scale": "linear", "exact_keys": 3, "softmax_heads": (1,)},
    "routed blocks": {"window": 5, "sinks": 3, "routed_blocks": "6:1"},
    "all with routed blocks": {**WITH_ROUTED, "softmax_heads": (2,), "trained_length": 12},
    "routed heads": {"window": 5, "sinks": 2, "routed_blocks": "4:1", "routed_heads": (1,)},
    "all with routed heads": {**WITH_ROUTED, "softmax_heads": (2,), "routed_heads": (0, 3), "trained_length": 12},
    "fading": {"window": 5, "scale": "linear", "softmax_heads": (2,), "trained_length": 12},
}
"""What a layer may add to its kernel, and what is joined with each other."""


def _added():
    for info in kernel_infos():
        for direction in directions(info) if info.preset is None else ():
            for name, hybrid in ADDITIONS.items():
                shape = HeadShape(HEADS, KEY_HEADS, DIM, WIDTH, direction == "causal")
                with contextlib.suppress(ConfigError):
                    build_mixer(info.name, needed(info), shape, Hybrid(**hybrid))
                    yield pytest.param(info, needed(info), direction, hybrid, id=f"{info.name}-{direction}-{name}")


ADDED = list(_added())
"""Every kernel with every addition that it takes, in both directions."""


def stirred(info, arguments, direction, **hybrid):
    """A mixer none of whose parameters is that of the start, at which most modules around a kernel do nothing."""
    mixer = make_mixer(info, arguments, causal=direction == "causal", **hybrid)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return mixer
