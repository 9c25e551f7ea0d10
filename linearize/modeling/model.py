"""Model classes of converted models: the original's class with kernels in its attentions."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from linearize.attention.cache import LinearizeCache, state_layer
from linearize.attention.interface import linear_attentions, register_interface
from linearize.attention.layer import LinearAttention
from linearize.attention.packing import find_documents, forget_documents
from linearize.attention.redirect import REDIRECTED, redirect
from linearize.errors import CheckpointError, ConfigError
from linearize.modeling.config import MODEL_TYPE, LinearizeConfig, check_checksum, config_class
from linearize.modeling.implementations import (
    IMPLEMENTATIONS,
    check_implementation,
    implementation,
    refusal,
    use_implementations,
)
from linearize.modeling.lookups import record_outputs, share_classes, share_renamings
from linearize.modeling.plan import ABSENT, CALLED, LOCAL, MASKED, OWN, UNKNOWN, LayerPlan, Plan, contradiction
from linearize.modeling.weights import (
    HUB_OPTIONS,
    absent_weights,
    check_loaded,
    check_numbers,
    check_weights,
    take_stored_names,
)
from linearize.ops.tracing import is_tracing

if TYPE_CHECKING:
    from transformers import GenerationConfig

    _Original = PreTrainedModel
else:
    _Original = object


class LinearizedModel(_Original):
    """Mixed into the original's class (first in the order of inheritance), so that it stays an instance of it."""

    # Features and sums are fp32 whatever the model's dtype, so its few parameters are kept in it too.
    _keep_in_fp32_modules_strict: Any = ("linear_attention",)
    whole: type[PreTrainedModel] | None = None
    """Class that a body has by itself, where this one is inside a model with a head."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        register_interface()
        super().__init__(config, *args, **kwargs)
        attach(self, Plan.from_dict(config.linearize))

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, but only where config.json and the weights belong together.

        Raises:
            CheckpointError: if the folder is damaged, a weight that was saved is not loaded, weights of a kernel are
                missing or have another size, or a weight is NaN or infinite.
        """
        name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        saved: set[str] = set()
        if name is not None and not kwargs.keys() & {"state_dict", "gguf_file"}:
            saved, again = check_checkpoint(name, **kwargs)
            if again is not None:
                kwargs["key_mapping"] = again | (kwargs.get("key_mapping") or {})
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        check_loaded(model, info, saved)
        check_numbers(model)
        # So that it is saved under the names that a freshly converted model is saved under.
        model._weight_conversions = None
        return (model, info) if output_loading_info else model

    @classmethod
    def is_custom_code(cls) -> bool:
        """Whether the original's code is the user's own. A load skips parts of such models as it fills in buffers."""
        return bool(cls.__mro__[cls.__mro__.index(LinearizedModel) + 1].is_custom_code())  # type: ignore[attr-defined]

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does; config.json says as well which weights the model was built without."""
        config: Any = self.config
        section = {key: value for key, value in config.linearize.items() if key != ABSENT}
        absent = absent_weights(self)
        config.linearize = section | ({ABSENT: absent} if absent else {})
        inner = type(self)
        self.__class__ = self.whole or inner  # type: ignore[assignment]
        try:
            return super().save_pretrained(*args, **kwargs)
        finally:
            self.__class__ = inner

    def set_attn_implementation(
        self, attn_implementation: str | dict[str, str], *args: object, **kwargs: object
    ) -> None:
        """Refuse anything but linear attention: a converted model has no other.

        Raises:
            ConfigError: always, unless the name is linearize's own.
        """
        if attn_implementation not in IMPLEMENTATIONS:
            raise ConfigError(refusal(attn_implementation))

    def init_continuous_batching(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse continuous batching (`generate_batch`), whose pages hold the keys of all tokens.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "got a call for continuous batching (generate_batch), which keeps keys and values in pages, but linear "
            "attention has a state of constant size per row; use generate() with the prompts as one padded batch"
        )

    def new_cache(self, crop: int = 0) -> LinearizeCache:
        """Make an empty generation cache whose size does not grow with the context.

        Args:
            crop: by how many tokens `cache.crop(-n)` can bring it back; it keeps up to twice as many keys and values
                for that, and a second state. What was cropped counts until as many tokens have followed.
        """
        return LinearizeCache(self.config.get_text_config(decoder=True), _cache_indices(self), crop)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any] | None = None,
        *args: object,
        **kwargs: object,
    ) -> Any:
        _check_generation(generation_config)
        if not isinstance(self, LinearizedModel):
            # Kyutai STT binds this function to its codec.
            prepare: Any = transformers.GenerationMixin._prepare_cache_for_generation
            return prepare(self, generation_config, model_kwargs, *args, **kwargs)
        prepare = super()._prepare_cache_for_generation  # type: ignore[misc]
        if model_kwargs is None:
            # A function of the host's own, which returns its cache of all keys (Diffusion-Gemma).
            return prepare(generation_config, *args, **kwargs)
        given = model_kwargs.get("past_key_values")
        prepare(generation_config, model_kwargs, *args, **kwargs)
        made = model_kwargs.get("past_key_values")
        if made is None or made is given:
            return
        if not isinstance(made, EncoderDecoderCache) and _is_own_cache(type(made)):
            return
        if generation_config.output_attentions:
            # Weights are those of pairs: the cache of all keys stays, as a sum over the past has none.
            return
        own = self.new_cache()
        if generation_config.is_assistant:
            own.activate_past_recording()
        if isinstance(made, EncoderDecoderCache):
            made.self_attention_cache = own
        else:
            model_kwargs["past_key_values"] = own


def _is_own_cache(kind: type) -> bool:
    """Whether a host keeps more than keys in a cache class of its own (MiniMax): its layers then hold all keys."""
    return issubclass(kind, DynamicCache) and kind.__module__.startswith("transformers.models.")


def _has_own_cache(model: nn.Module) -> bool:
    modules = [sys.modules[base.__module__] for base in type(model).__mro__ if base.__module__ in sys.modules]
    classes = [x for module in modules for x in vars(module).values() if isinstance(x, type)]
    return any(_is_own_cache(one) for one in classes)


def _check_generation(generation_config: GenerationConfig) -> None:
    """Refuse what a running sum cannot do, before the first token.

    Raises:
        ConfigError: for caches of another kind.
    """
    kind = generation_config.cache_implementation
    if kind not in (None, "dynamic"):
        raise ConfigError(
            f"got cache_implementation={kind!r}, but a model with linear attention has a cache of its own, whose size "
            "does not grow with the context; leave the argument out"
        )


def check_checkpoint(name: str | os.PathLike[str], **options: Any) -> tuple[set[str], dict[str, str] | None]:
    """Check that a folder's (or Hub repository's) config.json and weights belong together, without reading weights.

    Returns:
        The names that its weights have in the saved model, empty if that is not known, and what `check_weights` says of
        renamings.

    Raises:
        CheckpointError: if not.
    """
    hub = {key: options[key] for key in HUB_OPTIONS if options.get(key) is not None}
    values, _ = PreTrainedConfig.get_config_dict(name, **hub)
    if values.get("model_type") != MODEL_TYPE:
        return set(), None
    config = LinearizeConfig.from_dict(values)
    saved = saved_class(config)
    names: tuple[set[str], dict[str, str] | None] = (set(), None)
    if saved is not None and "quantization_config" not in values:
        names = check_weights(name, saved, config, **hub)
    # Last, so that whatever shows what was changed says so.
    check_checksum(values["linearize"])
    return names


def saved_class(config: Any) -> type[PreTrainedModel] | None:
    """Return the class of the model that a converted checkpoint holds; None if its original is not transformers' own.

    A class of the user's own can be anything; its kernels are checked after loading.
    """
    names = config.architectures
    saved = names[0] if isinstance(names, list) and names else config.linearize["base_architecture"]
    base = getattr(transformers, str(saved).removeprefix("Linearized"), None)
    known = isinstance(base, type) and issubclass(base, PreTrainedModel)
    return model_class(base, type(config)) if known else None  # type: ignore[arg-type]


_CLASSES: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}
_INNER = "Inner"


def _inner_class(whole: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Make (once) the class that a converted body has inside a model with a head."""
    if whole not in _CLASSES:
        name, base = f"{whole.__name__}{_INNER}", whole.__mro__[2]
        share_renamings(name, base, inner=True)
        _CLASSES[whole] = type(name, (whole,), {"__module__": __name__, "__doc__": whole.__doc__, "whole": whole})
    return _CLASSES[whole]


def model_class(base: type[PreTrainedModel], config: type) -> type[PreTrainedModel]:
    """Make (once) the class of converted models of `base`."""
    if base in _CLASSES:
        return _CLASSES[base]
    name = f"Linearized{base.__name__}"
    share_renamings(name, base)
    share_classes(base)
    kept = [*(base._keep_in_fp32_modules_strict or ()), *LinearizedModel._keep_in_fp32_modules_strict]
    _CLASSES[base] = type(
        name,
        (LinearizedModel, base),
        {
            "__module__": __name__,
            "__doc__": f"`{base.__name__}` with linear attention.",
            "config_class": config,
            "_keep_in_fp32_modules_strict": kept,
        },
    )
    return _CLASSES[base]


def __getattr__(name: str) -> type[PreTrainedModel]:
    """Make the class of converted models of one of transformers' classes by its name: so does pickle ask for it."""
    if name.endswith(_INNER) and not hasattr(transformers, name.removeprefix("Linearized")):
        return _inner_class(__getattr__(name.removesuffix(_INNER)))
    base = getattr(transformers, name.removeprefix("Linearized"), None) if name.startswith("Linearized") else None
    if not isinstance(base, type) or not issubclass(base, PreTrainedModel) or base.config_class is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register_interface()
    return model_class(base, config_class(base.config_class))


def attach(model: PreTrainedModel, plan: Plan) -> None:
    """Put a `LinearAttention` into every attention that the plan converts; layers that have one are left alone.

    Raises:
        CheckpointError: if the model has no module of a planned name.
    """
    register_interface()
    root = model.base_model
    _prepare(model, root)
    try:
        use_implementations(model, plan, implementation(model.config))
    except AttributeError:
        raise CheckpointError(
            f"the plan names an attention that {type(model).__name__} has not; config.json and the architecture do not "
            "belong together"
        ) from None
    for layer in plan.layers:
        try:
            host = root.get_submodule(layer.module)
        except AttributeError:
            raise CheckpointError(
                f"the plan names the attention {layer.module!r}, but {type(model).__name__} has no such module; "
                "config.json and the architecture do not belong together"
            ) from None
        if why := contradiction(host, layer):
            raise CheckpointError(
                f"the attention {layer.module!r} has another size or direction than config.json says: {why}; the file "
                "is damaged or was edited: convert the model again"
            )
        if not layer.converted:
            # Softmax in a layer that stays goes by this flag; eager softmax went by the mask alone.
            if not hasattr(host, "is_causal") or (
                MASKED in layer.host and OWN not in layer.host and layer.shape != UNKNOWN
            ):
                host.is_causal = layer.shape.causal  # type: ignore[assignment]
            continue
        if hasattr(host, "linear_attention"):
            continue
        _attach_kernel(host, layer, plan)
    causal = any(layer.shape.causal for layer in plan.converted)
    if plan.base_model_type not in REDIRECTED:
        root.register_forward_pre_hook(functools.partial(find_documents, causal=causal), with_kwargs=True)
        root.register_forward_hook(forget_documents, always_call=True)
    if causal:
        root.register_forward_pre_hook(_mask_while_tracing, with_kwargs=True)
        if not model.config.is_encoder_decoder:
            for part in (root, *_parts_with_caches(root)):
                default = functools.partial(_default_cache, own=_has_own_cache(part))
                part.register_forward_pre_hook(default, with_kwargs=True)


def _prepare(model: PreTrainedModel, root: nn.Module) -> None:
    """Do what all of a model needs to attend with kernels, to be saved in part, and to be loaded from a plain state."""
    if root is not model and isinstance(root, PreTrainedModel) and not isinstance(root, LinearizedModel):
        # So that it can be saved by itself, as a checkpoint that says what it was built without (a head's pooler).
        change_class(root, type(model.config), inner=True)
    model.register_load_state_dict_pre_hook(take_stored_names)
    for module in root.modules():
        if hasattr(type(module), _SLICING):
            setattr(module, _SLICING, _unsliced)


_SLICING = "_maybe_slice_kv_shared_inputs"
"""Method by which Gemma 4 leaves out tokens, and the rows of a 4-D mask, before layers that share keys."""


def _unsliced(
    hidden: Tensor, per_layer: object, positions: object, masks: object, *args: object, **kwargs: object
) -> Any:
    """Leave out nothing: linear attention's mask has no rows."""
    return hidden, per_layer, positions, masks


def change_class(model: PreTrainedModel, config: type[PreTrainedConfig], inner: bool = False) -> None:
    """Give a model, in place, the class of converted models of its own class; `config` is the class of its config."""
    whole = model_class(type(model), config)
    model.__class__ = _inner_class(whole) if inner else whole
    record_outputs(model)


def _attach_kernel(host: nn.Module, layer: LayerPlan, plan: Plan) -> None:
    """Put the kernel of one layer into its host."""
    attention = LinearAttention(*layer.mixer)
    if not any(t.is_meta for t in [*attention.parameters(), *attention.buffers()]):
        attention.reset_parameters(plan.seed + (layer.index or 0))
        reference = next(host.parameters(), None)
        if reference is not None and not reference.is_meta:
            attention.to(reference.device)
    attention.declares_direction = CALLED in layer.host
    attention.local_as_full = LOCAL in layer.host
    attention.cache_index = layer.cache_index
    host.linear_attention = attention
    attention.train(host.training)
    if plan.base_model_type in REDIRECTED:
        redirect(host)
    else:
        host.register_forward_pre_hook(_hand_over_cache, with_kwargs=True)


def _hand_over_cache(host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell the kernel which state belongs to this call: the attention function itself never sees the cache."""
    check_implementation(host)
    cache = kwargs.get("past_key_values")
    if cache is None:
        # Some hosts call it otherwise (GPT-NeoX, StarCoder, CTRL: layer_past).
        cache = next((one for one in (*kwargs.values(), *args) if isinstance(one, Cache)), None)
    attention: Any = host.linear_attention
    attention.hand_over(state_layer(cache, attention.cache_index))


def _parts_with_caches(root: PreTrainedModel) -> list[PreTrainedModel]:
    """List the parts beside the text that make a cache for themselves, such as a tower that reads sound in steps."""
    text = root.config.get_text_config(decoder=True)
    parts = [one for one in root.modules() if isinstance(one, PreTrainedModel) and one is not root]
    return [
        part
        for part in parts
        if part.config is not text
        and part.config is not root.config
        and "past_key_values" in inspect.signature(part.forward).parameters
        and _cache_indices(part)
    ]


def _default_cache(
    root: Any, args: tuple[Any, ...], kwargs: dict[str, Any], own: bool
) -> tuple[tuple[Any, ...], dict[str, object]] | None:
    """Give a forward that would make its own cache of all keys one of constant size instead.

    Not for an `own` class, nor where attention weights are asked for: later steps need all keys for theirs.
    """
    use_cache, text = kwargs.get("use_cache"), root.config.get_text_config(decoder=True)
    if use_cache is None:
        use_cache = getattr(root.config, "use_cache", getattr(text, "use_cache", False))
    weights = kwargs.get("output_attentions")
    if root.config.output_attentions if weights is None else weights:
        return None
    if not use_cache or root.training or kwargs.get("past_key_values") is not None or own:
        return None
    made: Cache = LinearizeCache(text, _cache_indices(root))
    if kwargs.get("encoder_hidden_states") is not None:
        # A decoder with cross-attention (in an EncoderDecoderModel): what it reads of the encoder is kept beside.
        made = EncoderDecoderCache(made, DynamicCache())
    return args, kwargs | {"past_key_values": made}


def _mask_while_tracing(
    root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, object]] | None:
    """Say that no token is padding where a tracer would otherwise prepare for packed sequences.

    transformers looks for packed sequences in position_ids; while tracing it cannot look and assumes them.
    """
    if not is_tracing() or len(args) > 1:
        return None
    given = ("attention_mask", "past_key_values", "position_ids", "inputs_embeds", "decoder_input_ids")
    tokens = args[0] if args else kwargs.get("input_ids")
    if tokens is None or any(kwargs.get(name) is not None for name in given):
        return None
    return args, kwargs | {"attention_mask": torch.ones_like(tokens)}


def _cache_indices(model: nn.Module) -> set[int]:
    layers = (layer for layer in linear_attentions(model).values() if layer.shape.causal)
    return {layer.cache_index for layer in layers if layer.cache_index is not None}


def is_linearized(model: nn.Module) -> bool:
    """Tell whether a model was converted."""
    return bool(linear_attentions(model))


def kernel_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the learnable parameters of all kernels, in the order of the layers."""
    return [p for layer in linear_attentions(model).values() for p in layer.parameters()]
