"""The backend in C, for whole calls of kernels whose map the native op supports."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linearize.attention.backends.causal import absurd_apart
from linearize.attention.call import AttentionCall, Kind, MixerState
from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.hybrid import fade
from linearize.attention.native import absence
from linearize.attention.native.gradient import WindowedAttention, attend_with_gradient
from linearize.attention.native.options import NEVER, AttendOptions
from linearize.attention.parts import NEAR, ROUTED, SCALED
from linearize.kernels.base import FeatureMap, MapSpec
from linearize.ops import Mapped, State, Window, causal_attention, window_attention
from linearize.ops.routed import Memory, with_room
from linearize.ops.state import put_back, real_first, real_tokens, take, without_padding
from linearize.ops.window_causal import state_after


class Native:
    """Whole calls in one pass, map included, with or without a window; a decoding step updates the state in place."""

    name, uses_op, supports = "native", False, NEAR | ROUTED | SCALED

    def why_not(self, mixer: FeatureMapMixer, kind: Kind) -> str:
        """Return why it declines such calls; empty if it can compute them."""
        if kind.has_state and not mixer.shape.causal:
            return "it cannot read keys of other processes"
        if not kind.one_step and mixer.window is not None and kind.has_state:
            return "it cannot add several tokens to the state of a window"
        if not kind.one_step and kind.gradient and (kind.has_state or kind.needs_state):
            return "its gradient does not pass through states"
        if mixer.hybrid.routed_blocks and not mixer.positive:
            return "it does not subtract weights that can be negative"
        if not kind.reads:
            here = kind.native is not None or (kind.device is not None and kind.device.type != "cpu")
            return "it only reads plain tensors in fp32 or bf16 on the CPU" if here else absence()
        if (why := unknown_maps(mixer, kind)) or not kind.one_step:
            return why
        if not kind.writes:
            return "it cannot write into this state"
        return "rows of different lengths fade differently" if kind.uneven else ""

    def run(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Return the output [B, H, T, V] and the state after, from the op in C."""
        native, mask, inputs = call.native, call.key_padding_mask, (call.q, call.k, call.v)
        if call.one_step and call.state is not None:
            state, maps = call.state, _packed_maps(mixer, call)
            if mixer.window is not None:
                blocks = mixer.hybrid.blocks if mixer.hybrid.routed_blocks else (0, 0)
                if blocks[0]:
                    state = with_room(state, 1, blocks[1])
                options = {"scaling": call.scaling, "eps": mixer.eps, "mask": mask, "blocks": blocks}
                if mixer.hybrid.routed_heads:
                    options["looks"] = _looks(mixer.hybrid.routed_heads, mixer.shape.heads)
                return native.window_step(maps, inputs, state, **options), state
            return native.step(maps, *inputs, (state["kv"], state["log_scale"]), eps=mixer.eps, mask=mask), state
        apart = absurd_apart(call.v, mask, call.q.shape[1]) if mixer.shape.causal else None
        if apart is not None:
            out, _ = self.run(mixer, replace(call, v=apart[0], needs_state=False))
            after = self._attend(mixer, call)[1] if call.needs_state else None
            return out + apart[1], after
        return self._attend(mixer, call)

    def _attend(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        native, mask, inputs = call.native, call.key_padding_mask, (call.q, call.k, call.v)
        if mixer.window is not None:
            return _attend_window(mixer, call)
        log_scale = mixer.log_scales(call)[1]
        options = AttendOptions(mixer.shape.causal, mixer.input_scale(call.scaling), mixer.eps, mask, log_scale)
        if not torch.is_grad_enabled():
            out, kv, level = native.attend(maps_of(mixer), *inputs, options, call.linear_state)
            return out, {"kv": kv, "log_scale": level} if call.needs_state else None

        def fallback(q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor | None) -> Tensor:
            queries, keys = mixer.features(replace(call, q=q, k=k, v=v), (None, log_scale))
            out, _ = causal_attention(queries.phi, keys.phi, v.float(), **mixer.options(call, keys.log_scale))
            return out.to(v.dtype)

        return attend_with_gradient(maps_of(mixer), *inputs, fallback, options), None


@functools.cache
def _looks(heads: tuple[int, ...], count: int) -> Tensor:
    """Tell which of `count` query heads look blocks up, [H] bool."""
    return torch.tensor([head in heads for head in range(count)], device="cpu")


def padding_last(call: AttentionCall) -> tuple[AttentionCall, Tensor | None]:
    """Return the call with the padding after the tokens of each row, and the order [B, T]; None without padding."""
    if call.key_padding_mask is None:
        return call, None
    order = real_first(call.key_padding_mask)
    mask = call.key_padding_mask.bool().gather(1, order)
    q, k, v = (take(x, order) for x in (call.q, call.k, call.v))
    positions = None if call.positions is None else call.positions.gather(1, order)
    return replace(call, q=q, k=k, v=v, key_padding_mask=mask, positions=positions), order


def _attend_window(mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
    call, order = padding_last(call)
    q, k, v, mask = call.q, call.k, call.v, call.key_padding_mask
    form = mixer.form(call.scaling)
    assert form is not None
    scales = mixer.log_scales(call)
    scale = mixer.input_scale(call.scaling)
    options = AttendOptions(form.causal, scale, mixer.eps, mask, log_scale=scales[1], query_scale=scales[0])
    if form.blocks:
        return _attend_routed(mixer, call, options, form, order)
    if form.exact_keys:
        # The log-scales of the keys' features decide the exact keys.
        scaled = maps_of(mixer)[0].scaled
        priority = mixer.map_tokens(k, call.scaling, native=call.native).log_scale if scaled else scales[1]
        options = options._replace(priority=torch.zeros(k.shape[:3]) if priority is None else priority)
    if torch.is_grad_enabled():
        queries, keys = mixer.features(call, scales)
        with torch.no_grad():
            attended = call.native.window(maps_of(mixer), q, k, v, options, form)
        out: Tensor = WindowedAttention.apply(attended, options, form, q, k, v, *queries, *keys)
        return out if order is None else put_back(out, order), None
    attended = call.native.window(maps_of(mixer), q, k, v, options, form)
    out = attended.out if order is None else put_back(attended.out, order)
    if not call.needs_state or not form.causal:
        return out, None
    kept = None if attended.until is None else attended.until == NEVER
    past = State(attended.kv, attended.log_scale)
    return out, state_after(k, v, real_tokens(k, mask), form, past, kept, options.priority).present()


def _attend_routed(
    mixer: FeatureMapMixer, call: AttentionCall, options: AttendOptions, form: Window, order: Tensor | None
) -> tuple[Tensor, MixerState | None]:
    """Attend with routed blocks, to a call whose padding is last."""
    native, mask, real = call.native, call.key_padding_mask, real_tokens(call.k, call.key_padding_mask)
    count, (q, k, v) = real.sum(dim=1), (without_padding(x, mask) for x in (call.q, call.k, call.v))
    queries, keys = mixer.features(replace(call, q=q, k=k), (options.query_scale, options.log_scale))
    sides = Mapped(q, *queries), Mapped(k, *keys)
    with torch.no_grad():
        near = native.window(maps_of(mixer), q, k, v.float(), options, form)
        memory = Memory.of(k, v, count, form.block_size)
        places = torch.arange(k.shape[2]).expand(len(k), -1)
        chosen = native.choose(q, memory.channels, places, count, form)
        result = native.routed(*sides, v, count, chosen, form, near)
    if result is None:
        out, _ = window_attention(*sides, v.float(), form, key_padding_mask=mask, choose=native.choose)
    elif torch.is_grad_enabled():
        out = WindowedAttention.apply(result, options, form, q, k, v, *queries, *keys)
    else:
        out = result.out
    out = (out if order is None else put_back(out, order)).to(call.v.dtype)
    if not call.needs_state or not form.causal:
        return out, None
    past = State(near.kv, near.log_scale)
    memory = memory.of_heads(form.remembered(q.shape[1], k.shape[1]))
    return out, state_after(k, v, real, form, past).present() | memory.present()


def unknown_maps(mixer: FeatureMapMixer, kind: Kind) -> str:
    """Return why the op cannot compute the mixer apart from its window; empty if it can."""
    if kind.offloaded:
        return "its weights are offloaded, and it reads them directly"
    if mixer.inputs is not None or mixer.output is not None or mixer.info.positional:
        return "it does not support what this kernel does before or after its map"
    if mixer.floor > 0.0 or not mixer.keys.normalize:
        return "it does not support this kernel's denominator"
    if any(map.map_spec() is None for map in _feature_maps(mixer)):
        return "it does not support this kernel's feature map"
    return ""


def _feature_maps(mixer: FeatureMapMixer) -> list[FeatureMap]:
    return [mixer.keys] if mixer.queries is None else [mixer.keys, mixer.queries]


def maps_of(mixer: FeatureMapMixer) -> list[MapSpec]:
    """Return the maps of keys and queries, or the single map that they share."""
    return [spec for map in _feature_maps(mixer) if (spec := map.map_spec()) is not None]


def _packed_maps(mixer: FeatureMapMixer, call: AttentionCall) -> Any:
    """Return the maps as the op reads them in a step, faded for the common position of the rows if they fade.

    Packing them takes as long as a decoding step. So the result is reused while the weights stay at the same addresses,
    if the op reads only parameters. The bias that fades is a separate buffer for each thread, because threads may share
    a model.
    """
    learned = [scale for scale in (mixer.key_scale, mixer.query_scale) if scale is not None]
    weights = [w for part in (*_feature_maps(mixer), *learned) for w in part._parameters.values()]
    key = [call.scaling, *[(w.data_ptr(), w.dtype, w.is_contiguous()) for w in weights if w is not None]]
    length, name, faded = mixer.hybrid.trained_length, "native.packed", None
    # Up to the trained length nothing fades, and all steps share one packed result without a buffer.
    if length is not None and float(call.places.max()) >= length:
        assert mixer.query_scale is not None and mixer.query_scale.bias is not None
        name = f"{name}.{threading.get_ident()}"
        faded = mixer.query_scale.bias.float() + fade(call.places[0], length)
    made_from, packed, bias = mixer.memory.get(name, (None, None, None))
    if made_from == key:
        if faded is not None:
            bias.copy_(faded)
        return packed
    tensors = [scale.tensors for scale in learned]
    if faded is not None:
        tensors[-1] = (tensors[-1][0], faded, *tensors[-1][2:])
    packed = call.native.pack(maps_of(mixer), mixer.input_scale(call.scaling), tensors)
    if {id(w) for w in packed.held} <= {id(w) for w in (*weights, faded)}:
        mixer.memory[name] = key, packed._replace(held=()), faded
    return packed
