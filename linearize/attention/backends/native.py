"""The op in C: for whole calls of kernels whose map it has, and as a causal op on given features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from linearize.attention.backends.contract import MappingMixer
from linearize.attention.backends.eager import PYTORCH
from linearize.attention.call import AttentionCall, MixerState, linear_state
from linearize.kernels.base import FeatureMap, Features, MapSpec
from linearize.native import engine, loaded
from linearize.native.gradient import attend_with_gradient, map_with_gradient
from linearize.native.options import NEVER, AttendOptions
from linearize.native.window_autograd import attend_window_with_gradient
from linearize.ops import LinearOptions, State, causal_attention
from linearize.ops.compact import put_back, real_first, take
from linearize.ops.state import EPS
from linearize.ops.window_causal import state_after


class NativeStep:
    """Decode one token, map included, in the state's own memory. See `contract.Backend`."""

    name = "native step"

    def supports(self, mixer: MappingMixer, call: AttentionCall) -> bool:
        """See `contract.Backend`."""
        if not call.one_step:
            return False
        native, state = engine(), call.state
        if native is None or state is None or mixer.window is not None or not _has_maps(mixer):
            return False
        return bool(native.supports_step(call.q, call.k, call.v, state["kv"], state["log_scale"]))

    def run(self, mixer: MappingMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """See `contract.Backend`."""
        native, state = loaded(), call.state
        assert state is not None
        maps, before = _packed_maps(mixer, native, call.scaling), (state["kv"], state["log_scale"])
        return native.step(maps, call.q, call.k, call.v, before, eps=mixer.eps, mask=call.key_padding_mask), state


class NativeWindowStep:
    """Decode one token behind a softmax window, in the state's own memory. See `contract.Backend`."""

    name = "native window step"

    def supports(self, mixer: MappingMixer, call: AttentionCall) -> bool:
        """See `contract.Backend`."""
        if mixer.window is None or not call.one_step:
            return False
        native, state = engine(), call.state
        if native is None or state is None or not _has_maps(mixer):
            return False
        return bool(native.supports_window_step(call.q, call.k, call.v, state))

    def run(self, mixer: MappingMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """See `contract.Backend`."""
        native, state = loaded(), call.state
        assert state is not None
        maps, mask = _packed_maps(mixer, native, call.scaling), call.key_padding_mask
        step = (maps, call.q, call.k, call.v, state)
        return native.window_step(*step, scaling=call.scaling, eps=mixer.eps, mask=mask), state


class NativeWindow:
    """Map and attend behind a softmax window in one pass. See `contract.Backend`."""

    name = "native window"

    def supports(self, mixer: MappingMixer, call: AttentionCall) -> bool:
        """See `contract.Backend`."""
        if mixer.window is None or call.state is not None:
            return False
        if torch.is_grad_enabled() and call.needs_state:
            # Through states, the ops in PyTorch know the gradient.
            return False
        native = engine()
        return native is not None and _has_maps(mixer) and bool(native.supports(call.q, call.k, call.v))

    def run(self, mixer: MappingMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """See `contract.Backend`."""
        q, k, v, mask, order = call.q, call.k, call.v, call.key_padding_mask, None
        if mask is not None:
            order = real_first(mask)
            q, k, v = (take(x, order) for x in (q, k, v))
            mask = mask.bool().gather(1, order)
        form = mixer.form(call.scaling)
        assert form is not None
        ordered = replace(call.with_inputs(q, k, v), key_padding_mask=mask)
        scales = mixer.log_scales(ordered)
        scale = mixer.input_scale(call.scaling)
        options = AttendOptions(form.causal, scale, mixer.eps, mask, log_scale=scales[1], query_scale=scales[0])
        if form.exact_keys:
            options = options._replace(priority=_priority(mixer, k, call.scaling, scales[1]))
        if torch.is_grad_enabled():
            features = mixer.features(ordered, scales)
            out = attend_window_with_gradient(_maps(mixer), (q, k, v), features, options, form)
            return out if order is None else put_back(out, order), None
        found = loaded().window(_maps(mixer), q, k, v, options, form)
        out = found.out if order is None else put_back(found.out, order)
        if not call.needs_state or not form.causal:
            return out, None

        def key_features(keys: Tensor) -> Features:
            return mixer.key_features(keys, call.scaling, None)

        kept = None if found.until is None else found.until == NEVER
        return out, state_after(k, v, mask, form, State(found.kv, found.log_scale), key_features, kept).present()


class Native:
    """Map and attend in one pass. See `contract.Backend`."""

    name = "native"

    def supports(self, mixer: MappingMixer, call: AttentionCall) -> bool:
        """See `contract.Backend`."""
        native = engine()
        if native is None or call.one_step or mixer.window is not None or not _has_maps(mixer):
            return False
        if torch.is_grad_enabled() and (call.state is not None or call.needs_state):
            # Through states, the ops in PyTorch know the gradient.
            return False
        return bool(native.supports(call.q, call.k, call.v))

    def run(self, mixer: MappingMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """See `contract.Backend`."""
        q, k, v = call.q, call.k, call.v
        mask, (_, log_scale) = call.key_padding_mask, mixer.log_scales(call)
        options = AttendOptions(mixer.shape.causal, mixer.input_scale(call.scaling), mixer.eps, mask, log_scale)
        if not torch.is_grad_enabled():
            out, kv, log_scale = loaded().attend(_maps(mixer), q, k, v, options, linear_state(call))
            return out, {"kv": kv, "log_scale": log_scale} if call.needs_state else None

        def fallback(q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor | None) -> Tensor:
            queries, keys = mixer.features(call.with_inputs(q, k, v), (None, log_scale))
            more: LinearOptions = {"key_padding_mask": mask, "log_scale": keys.log_scale, "eps": mixer.eps}
            return causal_attention(queries.phi, keys.phi, v.float(), **more)[0].to(v.dtype)

        return attend_with_gradient(_maps(mixer), q, k, v, fallback, options), None


def native_features(map: FeatureMap, x: Tensor, scale: float) -> Features | None:
    """Map x [B, H, T, D] times `scale` in the native op; None where it is not there, or has no such map."""
    native = engine()
    if native is None or not native.supports(x, x, x) or (known := map.map_spec()) is None:
        return None
    return Features(*map_with_gradient(known, x, scale))


def _has_maps(mixer: MappingMixer) -> bool:
    """Tell whether the op has the maps, and nothing but a window stands around them; worked out once."""
    found = mixer.memory.get("native.has_maps")
    if found is None:
        plain = mixer.inputs is None and mixer.output is None and mixer.floor == 0.0
        plain = plain and mixer.keys.normalize and not mixer.info.positional
        found = plain and all(map.map_spec() is not None for map in _feature_maps(mixer))
        mixer.memory["native.has_maps"] = found
    return bool(found)


def _priority(mixer: MappingMixer, k: Tensor, scaling: float, learned: Tensor | None) -> Tensor:
    """Return what exact keys are chosen by, the log-scales [B, K, T] of the keys' features."""
    if _maps(mixer)[0].scaled:
        found = mixer.key_features(k, scaling, None).log_scale
        assert found is not None
        return found
    return torch.zeros(k.shape[:3]) if learned is None else learned


def _feature_maps(mixer: MappingMixer) -> list[FeatureMap]:
    return [map for map in (mixer.keys, mixer.queries) if map is not None]


def _maps(mixer: MappingMixer) -> list[MapSpec]:
    """Return the maps of keys and queries, one where it is the same."""
    return [known for map in _feature_maps(mixer) if (known := map.map_spec()) is not None]


class _Packed(NamedTuple):
    """Maps as the op reads them, and which weights they were."""

    key: list[object]
    maps: Any


def _packed_maps(mixer: MappingMixer, native: Any, scaling: float) -> Any:
    """Return the maps as the op reads them.

    Describing them takes as long as a step: it is done once as long as the weights stay where they are, and where the
    op reads nothing but parameters.
    """
    learned = [scale for scale in (mixer.key_scale, mixer.query_scale) if scale is not None]
    weights = [w for part in (*_feature_maps(mixer), *learned) for w in part._parameters.values()]
    key = [scaling, *[(w.data_ptr(), w.dtype, w.is_contiguous()) for w in weights if w is not None]]
    kept = mixer.memory.get("native.packed")
    if isinstance(kept, _Packed) and kept.key == key:
        return kept.maps
    packed = native.pack(_maps(mixer), mixer.input_scale(scaling), [scale.tensors for scale in learned])
    if {id(w) for w in packed.held} <= {id(w) for w in weights}:
        mixer.memory["native.packed"] = _Packed(key, packed._replace(held=()))
    return packed


class NativeOp:
    """The op on given features. See `contract.CausalOp`."""

    name = "native causal op"
    through_states = PYTORCH

    def supports(self, x: Tensor, v: Tensor, *, normalize: bool) -> bool:
        """See `contract.CausalOp`."""
        return normalize and x.is_cpu and engine() is not None

    def attend(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> tuple[Tensor, State]:
        """See `contract.CausalOp`; with a gradient, the op in PyTorch attends."""
        if _has_gradient(phi_q, phi_k, v, options.get("log_scale")) or not _readable(phi_q, phi_k, v):
            return causal_attention(phi_q, phi_k, v, **options)
        out, kv, top = engine().attend([], phi_q, phi_k, v, _attend_options(options), options.get("initial_state"))
        return out, State(kv, top)

    def output(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        """See `contract.CausalOp`."""
        log_scale, state = options.get("log_scale"), options.get("initial_state")
        plain = state is not None or not _readable(phi_q, phi_k, v)
        if plain or not _has_gradient(phi_q, phi_k, v, log_scale):
            return self.attend(phi_q, phi_k, v, **options)[0]

        def fallback(phi_q: Tensor, phi_k: Tensor, v: Tensor, log_scale: Tensor | None) -> Tensor:
            changed: LinearOptions = {**options, "log_scale": log_scale}
            return causal_attention(phi_q, phi_k, v, **changed)[0]

        return attend_with_gradient([], phi_q, phi_k, v, fallback, _attend_options(options))


def _has_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _readable(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> bool:
    """Tell whether the op reads these features, whatever was asked before they were made."""
    native = engine()
    return native is not None and bool(native.supports(phi_q, phi_k, v))


def _attend_options(options: LinearOptions) -> AttendOptions:
    """Return the options of a causal op as the native one takes them."""
    mask, eps = options.get("key_padding_mask"), options.get("eps", EPS)
    return AttendOptions(True, 1.0, eps, mask=mask, log_scale=options.get("log_scale"))
