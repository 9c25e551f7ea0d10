"""Model classes of converted models: the original's class with kernels in its attentions."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from linearize.attention.cache import LinearizeCache, state_layer
from linearize.attention.interface import linear_attentions, register_interface
from linearize.attention.layer import LinearAttention
from linearize.attention.mixer import IMPLEMENTATION
from linearize.errors import CheckpointError, ConfigError
from linearize.modeling.plan import Plan


class LinearizedModel:
    """Mixed into the original's class (first in the order of inheritance), so that it stays an instance of it."""

    # Features and sums are fp32 whatever the model's dtype, so its few parameters are kept in it too.
    _keep_in_fp32_modules_strict: Any = ("linear_attention",)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        attach(self, Plan.from_dict(config.linearize))  # type: ignore[arg-type]

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does; kernels that the file lacks are an error, never a fresh start.

        Raises:
            CheckpointError: if the weights of a kernel are missing or have another size.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        for what in ("missing_keys", "mismatched_keys"):
            bad = sorted(str(key) for key in info.get(what, ()) if ".linear_attention." in str(key))
            if bad:
                raise CheckpointError(
                    f"the weights file lacks kernels that config.json asks for ({what}: {bad[0]}"
                    f"{f' and {len(bad) - 1} more' if len(bad) > 1 else ''}); the checkpoint is incomplete: "
                    "download it again or convert the model again"
                )
        return (model, info) if output_loading_info else model

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse anything but linear attention: a converted model has no other.

        Raises:
            ConfigError: always, unless the name is linearize's own.
        """
        if attn_implementation != IMPLEMENTATION:
            raise ConfigError(
                f"got attn_implementation={attn_implementation!r}, but a converted model runs its own linear "
                "attention; load the original checkpoint for softmax"
            )

    def new_cache(self) -> LinearizeCache:
        """Make an empty generation cache whose size does not grow with the context."""
        config = self.config.get_text_config(decoder=True)  # type: ignore[attr-defined]
        return LinearizeCache(config, _cache_indices(self))  # type: ignore[arg-type]

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        given = model_kwargs.get("past_key_values")
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        made = model_kwargs.get("past_key_values")
        if made is None or made is given:
            return
        if isinstance(made, EncoderDecoderCache):
            made.self_attention_cache = self.new_cache()
        else:
            model_kwargs["past_key_values"] = self.new_cache()


_CLASSES: dict[Any, Any] = {}


def model_class(base: type[PreTrainedModel], config: type) -> type[PreTrainedModel]:
    """Make (once) the class of converted models of `base`."""
    if base in _CLASSES:
        return _CLASSES[base]
    kept = [*(base._keep_in_fp32_modules_strict or ()), *LinearizedModel._keep_in_fp32_modules_strict]
    _CLASSES[base] = type(
        f"Linearized{base.__name__}",
        (LinearizedModel, base),
        {
            "__module__": __name__,
            "__doc__": f"`{base.__name__}` with linear attention.",
            "config_class": config,
            "_keep_in_fp32_modules_strict": kept,
        },
    )
    return _CLASSES[base]


def attach(model: PreTrainedModel, plan: Plan) -> None:
    """Put a `LinearAttention` into every attention that the plan converts; layers that have one are left alone.

    Raises:
        CheckpointError: if the model has no module of a planned name.
    """
    register_interface()
    root = model.base_model
    for layer in plan.layers:
        try:
            host = root.get_submodule(layer.module)
        except AttributeError:
            raise CheckpointError(
                f"the plan names the attention {layer.module!r}, but {type(model).__name__} has no such module; "
                "config.json and the architecture do not belong together"
            ) from None
        if not layer.converted:
            if not hasattr(host, "is_causal"):
                host.is_causal = layer.shape.causal  # type: ignore[assignment]
            continue
        if hasattr(host, "linear_attention"):
            continue
        attention = LinearAttention(layer.kernel, layer.arguments, layer.shape)
        if not any(t.is_meta for t in [*attention.parameters(), *attention.buffers()]):
            attention.reset_parameters(plan.seed + (layer.index or 0))
            reference = next(host.parameters(), None)
            if reference is not None and not reference.is_meta:
                attention.to(reference.device)
        host.linear_attention = attention
        attention.train(host.training)
        host.register_forward_pre_hook(_hand_over_cache, with_kwargs=True)
    if any(layer.shape.causal for layer in plan.converted) and not model.config.is_encoder_decoder:
        root.register_forward_pre_hook(_default_cache, with_kwargs=True)


def _hand_over_cache(host: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Tell the kernel which state belongs to this call: the attention function itself never sees the cache."""
    layer = state_layer(kwargs.get("past_key_values"), getattr(host, "layer_idx", None))
    host.linear_attention.cache_layer = layer  # type: ignore[union-attr]


def _default_cache(root: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Give a forward that would make its own cache of all keys one of constant size instead."""
    use_cache = kwargs.get("use_cache")
    use_cache = getattr(root.config, "use_cache", False) if use_cache is None else use_cache
    if not use_cache or root.training or kwargs.get("past_key_values") is not None:
        return None
    made = LinearizeCache(root.config.get_text_config(decoder=True), _cache_indices(root))
    return args, kwargs | {"past_key_values": made}


def _cache_indices(model: nn.Module) -> set[int]:
    hosts: Any = (model.get_submodule(name) for name, layer in linear_attentions(model).items() if layer.shape.causal)
    return {host.layer_idx for host in hosts if getattr(host, "layer_idx", None) is not None}


def is_linearized(model: nn.Module) -> bool:
    """Tell whether a model was converted."""
    return bool(linear_attentions(model))


def kernel_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the learnable parameters of all kernels, in the order of the layers."""
    return [p for layer in linear_attentions(model).values() for p in layer.parameters()]
