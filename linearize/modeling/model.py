"""Model classes of converted models: the original's class with kernels in its attentions."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator
from contextvars import ContextVar
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import transformers
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from linearize.attention.cache import LinearizeCache, given_cache
from linearize.attention.interface import linear_attentions, register_interface
from linearize.attention.layer import LinearAttention
from linearize.attention.packing import find_documents, forget_documents
from linearize.attention.redirect import REDIRECTED, redirect
from linearize.core.errors import CheckpointError, ConfigError, some
from linearize.core.registry import Values, kernel_info, make_config
from linearize.modeling.caches import (
    add_default_caches,
    check_generation,
    hand_over_cache,
    make_cache,
    mask_while_tracing,
    use_cache_for_generation,
)
from linearize.modeling.compat import (
    IMPLEMENTATIONS,
    enter_parts,
    forget_renamings,
    implementation,
    keep_tokens,
    record_outputs,
    refusal,
    share_tables,
    use_implementations,
)
from linearize.modeling.config import MODEL_TYPE, PREFIX, LinearizeConfig, check_checksum, config_class
from linearize.modeling.plan import ABSENT, CALLED, LOCAL, MASKED, OWN, UNKNOWN, LayerPlan, Plan, contradiction, damaged
from linearize.modeling.weights import (
    HUB_OPTIONS,
    INDEX,
    SINGLE,
    absent_weights,
    check_loaded,
    check_weights,
    take_stored_names,
    with_variant,
)

if TYPE_CHECKING:
    _Original = PreTrainedModel
else:
    _Original = object


_BUILDING: ContextVar[object] = ContextVar("linearize_building", default=())
"""The section of the converted model that is being built in this thread."""


class LinearizedModel(_Original):
    """Mixin for the original's class, first in the method resolution order: the model stays an instance of it."""

    # Features and sums are fp32 whatever the model's dtype, so the few kernel parameters are kept in fp32 too.
    _keep_in_fp32_modules_strict: Any = ("linear_attention",)
    whole: type[PreTrainedModel] | None = None
    """The class of the body outside of a model with a head; None if it is this class."""

    def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:
        register_interface()
        original: Any = type(self).__mro__[type(self).__mro__.index(LinearizedModel) + 1]
        if original.config_class in config.sub_configs.values() and not isinstance(config, original.config_class):
            whole = config.linearize["base_architecture"]
            raise CheckpointError(
                f"{original.__name__} is only a part of {whole}, from which this checkpoint was converted and whose "
                f"attentions its plan names; load it with an Auto class of {whole}"
            )
        share_tables({one.__module__ for one in type(self).__mro__})
        enter_parts(config)
        # A model may build its body, or all of itself, by an Auto class: the plan is then that of the model around.
        around = _BUILDING.set(config.linearize)
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            _BUILDING.reset(around)
        if _BUILDING.get() != config.linearize:
            attach(self, Plan.from_dict(config.linearize))

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, after checking that config.json and the weights belong together.

        Raises:
            CheckpointError: if the folder is damaged, a saved weight is not loaded, kernel weights are missing or have
                the wrong size, or a weight is NaN or infinite.
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
        # So that weights are saved under the same names as those of a freshly converted model.
        forget_renamings(model)
        return (model, info) if output_loading_info else model

    @classmethod
    def is_custom_code(cls) -> bool:
        """Whether the original is the user's own code; loading does not fill in all buffers of such models."""
        return bool(cls.__mro__[cls.__mro__.index(LinearizedModel) + 1].is_custom_code())  # type: ignore[attr-defined]

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does, and list in config.json the weights that the model was built without.

        Raises:
            CheckpointError: if its layers were changed so that a load would refuse the checkpoint; nothing is written.
        """
        inner = type(self)
        with config_copied(self) as config:
            plan = Plan.from_dict(config.linearize)
            left, gone = remaining(self, plan)
            section = {key: value for key, value in config.linearize.items() if key != ABSENT}
            config.linearize = section if left == plan else section | left.to_dict()
            absent = absent_weights(self)
            if missed := next((x for x in gone if any(f".{x}." in f".{name}" for name in absent)), None):
                raise CheckpointError(
                    f"{type(self).__name__}: attention {missed!r} was taken out, but the config still asks for it; set "
                    "the number of layers in model.config too (num_hidden_layers, or its other name)"
                )
            config.linearize |= {ABSENT: absent} if absent else {}
            self.__class__ = self.whole or inner  # type: ignore[assignment]
            try:
                with older_weights_replaced(*args, **kwargs):
                    return super().save_pretrained(*args, **kwargs)
            finally:
                self.__class__ = inner

    def set_attn_implementation(
        self, attn_implementation: str | dict[str, str], *args: object, **kwargs: object
    ) -> None:
        """Accept only linear attention: a converted model has no other.

        Raises:
            ConfigError: always, unless the name is linearize's own.
        """
        if attn_implementation not in IMPLEMENTATIONS:
            raise ConfigError(refusal(attn_implementation))

    def init_continuous_batching(self, *args: object, **kwargs: object) -> NoReturn:
        """Reject continuous batching (`generate_batch`), whose pages hold the keys of all tokens.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "got a call for continuous batching (generate_batch), which keeps keys and values in pages, but linear "
            "attention has a state of constant size per row; use generate() with the prompts as one padded batch"
        )

    def new_cache(self, crop: int = 0) -> LinearizeCache:
        """Return an empty generation cache whose size does not grow with the context.

        Args:
            crop: largest n of `cache.crop(-n)`. For this the cache keeps keys and values of up to twice as many tokens,
                and a second state. Cropped tokens count towards n until the same number of new tokens has followed.
                Softmax layers with a sliding window then keep all keys.
        """
        return make_cache(self, crop)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: Values | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        check_generation(generation_config, getattr(self, "generation_config", None))
        if not isinstance(self, LinearizedModel):
            # Kyutai STT binds this function to its codec.
            prepare: Any = transformers.GenerationMixin._prepare_cache_for_generation
            return prepare(self, generation_config, model_kwargs, *args, **kwargs)
        prepare = super()._prepare_cache_for_generation  # type: ignore[misc]
        if model_kwargs is None:
            # This is the host's own function, which returns its cache of all keys (Diffusion-Gemma).
            return prepare(generation_config, *args, **kwargs)
        given = given_cache(model_kwargs)
        prepare(generation_config, model_kwargs, *args, **kwargs)
        use_cache_for_generation(self, generation_config, given, model_kwargs)


@contextlib.contextmanager
def older_weights_replaced(
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: object = None,
    push_to_hub: bool = False,
    max_shard_size: object = None,
    variant: str | None = None,
    *_: object,
    **__: object,
) -> Iterator[None]:
    """After a `save_pretrained` with these arguments, delete the folder's older weights of the other form.

    transformers leaves an older file there when it writes shards, and then loads the older weights.
    """
    forms = [Path(save_directory, with_variant(name, variant)) for name in (SINGLE, INDEX)]
    before = {form: form.stat() for form in forms if form.is_file()}
    yield
    kept = [form for form, stat in before.items() if form.is_file() and form.stat() == stat]
    if len(kept) < sum(form.is_file() for form in forms):
        for form in kept:
            form.unlink()


def check_checkpoint(name: str | os.PathLike[str], **options: Any) -> tuple[set[str], dict[str, str] | None]:
    """Check that the config.json and weights of a folder (or Hub repository) belong together, without reading weights.

    Returns:
        The names of the weights in the saved model (empty if unknown), and the renamings that `check_weights` returns.

    Raises:
        CheckpointError: if they do not belong together.
    """
    hub = {key: options[key] for key in HUB_OPTIONS if options.get(key) is not None}
    values, _ = PreTrainedConfig.get_config_dict(name, **hub)
    names: tuple[set[str], dict[str, str] | None] = (set(), None)
    if values.get("model_type") != MODEL_TYPE:
        return names
    config = LinearizeConfig.from_dict(values)
    saved = saved_class(config)
    if saved is not None and "quantization_config" not in values:
        names = check_weights(name, saved, config, options.get("variant"), **hub)
    # Check this last, because the checks above say more precisely what was changed.
    check_checksum(values["linearize"])
    return names


def saved_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the model class of a converted checkpoint; None if its original is not a transformers class.

    The kernels of such other classes are checked after loading.
    """
    names = config.architectures
    saved = names[0] if isinstance(names, list) and names else config.linearize["base_architecture"]
    base = getattr(transformers, str(saved).removeprefix(PREFIX), None)
    if isinstance(base, type) and issubclass(base, PreTrainedModel):
        return model_class(base, type(config))
    return None


_INIT = PreTrainedModel.__init__


@functools.wraps(_INIT)
def _build(self: PreTrainedModel, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:
    """Build a model as transformers does; others get the config of a converted model inside one only.

    Raises:
        CheckpointError: if it is not inside one: it would run softmax.
    """
    if isinstance(config, LinearizeConfig) and not isinstance(self, LinearizedModel) and not _BUILDING.get():
        name = type(self).__name__
        raise CheckpointError(
            f"{name}: got the {type(config).__name__} of a converted model, with which it would run softmax; expected "
            f"an Auto class, such as AutoModel.from_config(config), or {name}.from_pretrained(folder, config=config)"
        )
    _INIT(self, config, *args, **kwargs)


PreTrainedModel.__init__ = _build  # type: ignore[method-assign]

_CLASSES: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}
_INNER = "Inner"


def _inner_class(whole: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class of a converted body inside a model with a head, creating it once."""
    if whole not in _CLASSES:
        values = {"__module__": __name__, "__qualname__": f"{whole.__qualname__}{_INNER}", "__doc__": whole.__doc__}
        _CLASSES[whole] = type(whole.__name__, (whole,), values | {"whole": whole})
    return _CLASSES[whole]


def model_class(base: type[PreTrainedModel], config: type) -> type[PreTrainedModel]:
    """Return the class of converted models of `base`, creating it once; it has the same name, by which many ask."""
    if base in _CLASSES:
        return _CLASSES[base]
    kept = [*(base._keep_in_fp32_modules_strict or ()), *LinearizedModel._keep_in_fp32_modules_strict]
    values = {"__module__": __name__, "__qualname__": f"{PREFIX}{base.__name__}"}
    values["__doc__"] = f"`{base.__name__}` with linear attention."
    own = {"config_class": config, "_keep_in_fp32_modules_strict": kept}
    _CLASSES[base] = type(base.__name__, (LinearizedModel, base), values | own)
    return _CLASSES[base]


def __getattr__(name: str) -> type[PreTrainedModel]:
    """Create the converted counterpart of a transformers class on demand.

    pickle looks it up by its qualified name, and an adapter of peft by its name.
    """
    if name.endswith(_INNER) and not hasattr(transformers, name.removeprefix(PREFIX)):
        return _inner_class(__getattr__(name.removesuffix(_INNER)))
    base = getattr(transformers, name.removeprefix(PREFIX), None)
    if not isinstance(base, type) or not issubclass(base, PreTrainedModel) or base.config_class is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register_interface()
    return model_class(base, config_class(base.config_class))


def attach(model: PreTrainedModel, plan: Plan) -> None:
    """Put a `LinearAttention` into every attention that the plan converts, unless it already has one.

    A class other than the plan's may lack parts of it, such as the encoder or the text tower.

    Raises:
        CheckpointError: if the model has no module of a planned name.
    """
    register_interface()
    root: nn.Module = model.base_model
    plan = _plan_of_class(model, plan)
    _name_parts(model)
    model.register_load_state_dict_pre_hook(take_stored_names)
    keep_tokens(root)
    for layer in plan.layers:
        host = root.get_submodule(layer.module)
        if why := contradiction(host, layer):
            raise damaged(f"attention {layer.module!r} has a different size or direction: {why}")
        if layer.converted:
            if not hasattr(host, "linear_attention"):
                _attach_kernel(host, layer, plan)
            continue
        told = not {MASKED, CALLED}.isdisjoint(layer.host) and OWN not in layer.host and layer.shape != UNKNOWN
        if told or not hasattr(host, "is_causal"):
            # Softmax in a layer that is not converted uses this flag; eager softmax used only the mask.
            vars(host)["is_causal"] = layer.shape.causal
    use_implementations(model, plan, implementation(model.config))
    causal = True in {layer.shape.causal for layer in plan.converted}
    if plan.base_model_type not in REDIRECTED:
        root.register_forward_pre_hook(functools.partial(find_documents, causal=causal), with_kwargs=True)
        root.register_forward_hook(forget_documents, always_call=True)
    if causal:
        root.register_forward_pre_hook(mask_while_tracing, with_kwargs=True)
        if not model.config.is_encoder_decoder:
            add_default_caches(root)  # type: ignore[arg-type]


def _name_parts(model: PreTrainedModel) -> None:
    """Give converted parts inside a model their own classes, so that weights are renamed once, by the model's."""
    root: nn.Module = model.base_model
    if root is not model and isinstance(root, PreTrainedModel) and not isinstance(root, LinearizedModel):
        # So that the body can be saved separately, with a list of the weights that it was built without (a pooler).
        change_class(root, type(model.config), inner=True)
    for part in model.modules():
        if part is not model and isinstance(part, LinearizedModel) and part.whole is None:
            part.__class__ = _inner_class(type(part))  # type: ignore[assignment]


def _plan_of_class(model: PreTrainedModel, plan: Plan) -> Plan:
    """Return a plan without the parts that a class lacks in comparison with the plan's own.

    Raises:
        CheckpointError: if the plan's own class lacks one, or if another may have it under another name, where it would
            stay softmax.
    """
    root: nn.Module = model.base_model
    hosts, name = dict(root.named_modules()), type(model).__name__
    absent = [layer.module for layer in plan.layers if layer.module not in hosts and layer.in_body]
    missing = (
        next(x for x in itertools.accumulate(one.split("."), "{}.{}".format) if x not in hosts) for one in absent
    )
    # A part is lacking as a whole; one layer of a list was taken out.
    if absent and (name == plan.architecture or any(one.rpartition(".")[2].isdigit() for one in missing)):
        raise CheckpointError(
            f"config.json: the plan names attention {absent[0]!r}, but {name} has no such module: an argument such as "
            "num_hidden_layers, or an edit, left layers out; load the whole checkpoint (to take layers out, do so in "
            "the loaded model and save it)"
        )
    # The names of attentions outside of the body are not those of hosts.
    plan = dataclasses.replace(plan, layers=tuple(layer for layer in plan.layers if layer.module in hosts))
    planned, ends = {hosts[layer.module] for layer in plan.layers}, {one.rpartition(".")[2] for one in absent}
    moved = [key for key, one in model.named_modules() if key.rpartition(".")[2] in ends and one not in planned]
    if moved or not plan.converted:
        what = f"has attentions that the plan does not name ({some(moved)})" if moved else "has no converted attention"
        raise CheckpointError(
            f"{name} {what}, expected the parts of {plan.architecture}, from which this checkpoint was converted; load "
            "it with the Auto class of that, or convert a checkpoint of this class"
        )
    return plan


def remaining(model: PreTrainedModel, plan: Plan) -> tuple[Plan, list[str]]:
    """Return the plan without layers that were taken out of a converted model, and the names of their attentions.

    Raises:
        CheckpointError: if an attention is not as the plan says.
    """
    root: nn.Module = model.base_model
    live, hosts = linear_attentions(root), {name for name, _ in root.named_modules(remove_duplicate=False)}
    layers = [layer for layer in plan.layers if not layer.in_body or layer.module in hosts]
    planned = {layer.module: layer for layer in layers if layer.converted}
    other = [name for name in {**live, **planned} if name not in live or name not in planned]
    other += [name for name in planned if name in live and not _is_as_planned(live[name], planned[name])]
    if other:
        raise CheckpointError(
            f"{type(model).__name__}: attention {other[0]!r} is not as config.linearize says, so a load would refuse "
            "the checkpoint: layers were added, moved or replaced after the conversion; undo that, or change the "
            "original's layers and convert it"
        )
    numbers = itertools.count()
    layers = [layer if layer.index is None else dataclasses.replace(layer, index=next(numbers)) for layer in layers]
    absent = [layer.module for layer in plan.layers if layer.in_body and layer.module not in hosts]
    return dataclasses.replace(plan, layers=tuple(layers)), absent


def _is_as_planned(attention: LinearAttention, layer: LayerPlan) -> bool:
    same = (attention.kernel, attention.shape, attention.hybrid) == (layer.kernel, layer.shape, layer.hybrid)
    return same and attention.mixer.config == make_config(kernel_info(layer.kernel), layer.arguments)


def change_class(model: PreTrainedModel, config: type[PreTrainedConfig], inner: bool = False) -> None:
    """Turn a model, in place, into an instance of its class's converted counterpart; `config` is a config class."""
    whole = model_class(type(model), config)
    model.__class__ = _inner_class(whole) if inner else whole
    record_outputs(model)


def _attach_kernel(host: nn.Module, layer: LayerPlan, plan: Plan) -> None:
    """Put the kernel of one layer into its host."""
    attention = LinearAttention(*layer.mixer)
    if not any(map(attrgetter("is_meta"), [*attention.parameters(), *attention.buffers()])):
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
        host.register_forward_pre_hook(hand_over_cache, with_kwargs=True)


@contextlib.contextmanager
def config_copied(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    """Temporarily give a model a copy of its config, because saving writes into it; yield the copy."""
    given = model.config
    model.config = copy.deepcopy(given)
    try:
        yield model.config
    finally:
        model.config = given


def is_linearized(model: nn.Module) -> bool:
    """Tell whether a model was converted."""
    return bool(linear_attentions(model))


def kernel_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the learnable parameters of all kernels, in the order of the layers."""
    return [p for layer in linear_attentions(model).values() for p in layer.parameters()]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Temporarily switch a model to evaluation mode, then restore every module's mode.

    `model.train(before)` would also switch modules to training that are kept in evaluation mode, such as frozen norms.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
