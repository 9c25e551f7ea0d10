"""PyTorch, one token of decoding: the state is updated in its own memory, without a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.attention.backends.contract import MappingMixer
from linearize.attention.call import AttentionCall, MixerState, linear_state
from linearize.ops import advance
from linearize.ops.state import without_padding


class OneStep:
    """See `contract.Backend`."""

    name = "one step"

    def supports(self, mixer: MappingMixer, call: AttentionCall) -> bool:
        """See `contract.Backend`."""
        return mixer.window is None and mixer.floor == 0.0 and call.one_step

    def run(self, mixer: MappingMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """See `contract.Backend`."""
        if mixer.symmetric and call.q.shape[1] == call.k.shape[1]:
            both = torch.cat([without_padding(x, call.key_padding_mask) for x in (call.q, call.k)], dim=2)
            found = mixer.key_features(both, call.scaling, None)
            phi_q, phi_k = found.phi[:, :, :1], found.phi[:, :, 1:]
            log_scale = None if found.log_scale is None else found.log_scale[..., 1:]
        else:
            queries, keys = mixer.features(call)
            phi_q, phi_k, log_scale = queries.phi, keys.phi, keys.log_scale
        before = linear_state(call)
        assert before is not None
        out, state = advance(
            phi_q,
            phi_k,
            call.v,
            before,
            key_padding_mask=call.key_padding_mask,
            log_scale=log_scale,
            normalize=mixer.keys.normalize,
            eps=mixer.eps,
        )
        return mixer.cast_output(out, call.v.dtype), state._asdict()
