"""Random calls of the ops, and their gradients."""

import torch

from linearize.ops.causal import parallel_sums
from linearize.ops.state import Options


def make(tokens, *, batch=2, heads=4, key_heads=2, features=5, width=3, scaled=False, padded=None, seed=0):
    """Random features, values, mask and log-scales of one call."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.rand(*shape, generator=generator)

    phi_q = draw(batch, heads, tokens, features).requires_grad_()
    phi_k = draw(batch, key_heads, tokens, features).requires_grad_()
    v = (draw(batch, key_heads, tokens, width) - 0.5).requires_grad_()
    scale = ((draw(batch, key_heads, tokens) - 0.5) * 60).requires_grad_() if scaled else None
    mask = None
    if padded is not None and tokens > 1:
        mask = torch.ones(batch, tokens, dtype=torch.long)
        cut = tokens // 3
        mask[0, :cut] = 0 if padded == "left" else 1
        mask[0, tokens - cut :] = 0 if padded == "right" else mask[0, tokens - cut :]
    return phi_q, phi_k, v, scale, mask


def gradients(out, leaves):
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    return torch.autograd.grad((out * weights).sum(), leaves)


def parallel_attention(phi_q, phi_k, v, **options):
    """The causal op with all chunks at once, as on a GPU and in traced graphs."""
    given = Options(**options)
    keys, values, scale = given.keys(phi_k), given.values(v), given.scale(phi_k)
    mixed, _, after = parallel_sums(phi_q, keys, values, scale, given.start(phi_k, v))
    return given.divided(mixed).to(v.dtype), after
