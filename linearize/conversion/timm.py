"""timm models: wrapped as transformers models, so that they are saved like any other, and run once for a plan.

timm's attentions have no interface to register with, but they call `F.scaled_dot_product_attention` themselves. These
calls are recorded here, and redirected in a converted model (`linearize.attention.redirect`). Plain attentions that
compute softmax themselves (TNT, SHViT) get a forward from there that calls it; others (LeViT, CaiT, XCiT ...) are not
recorded, but refused with the reason.
"""

from __future__ import annotations

import contextlib
import re
import types
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from linearize.attention.redirect import form
from linearize.conversion.inputs import Call
from linearize.core.errors import ConfigError, UnsupportedModelError
from linearize.core.registry import Values


def is_timm(model: nn.Module) -> bool:
    """Tell whether a model is a bare timm model, not one that transformers wraps."""
    return not isinstance(model, PreTrainedModel) and hasattr(model, "pretrained_cfg") and hasattr(model, "num_classes")


def wrap(model: nn.Module, model_args: Mapping[str, object] | None = None) -> PreTrainedModel:
    """Wrap a bare timm model as a transformers model with the same weights.

    Args:
        model: a model from `timm.create_model`.
        model_args: arguments of `timm.create_model` other than the name; needed for those that change weights or
            layers, except `num_classes`, `img_size` and `_TOLD`, which are read from the model.

    Returns:
        `TimmWrapperForImageClassification`, or `TimmWrapperModel` for a model without a classifier.

    Raises:
        ConfigError: if timm does not build the same model from these arguments.
    """
    from transformers import TimmWrapperConfig, TimmWrapperForImageClassification, TimmWrapperModel

    source: Values = dict(getattr(model, "pretrained_cfg", ()))
    plain = (str, int, float, bool, list, tuple, type(None))
    facts: Values = {key: value for key, value in source.items() if isinstance(value, plain)}
    classes = int(getattr(model, "num_classes", 0))
    arguments = {name: value for name, value in (model_args or {}).items() if name != "num_classes"}
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is not None:
        size = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
        if size != tuple(facts.get("input_size", (3, 224, 224)))[-2:]:
            arguments.setdefault("img_size", list(size))
        facts["input_size"] = [getattr(model, "in_chans", facts.get("input_size", (3,))[0]), *size]
    values = {"architecture": facts.get("architecture"), "num_classes": classes, "pretrained_cfg": facts}
    labels = {"num_labels": classes} if classes else {}
    wrapper: Any = TimmWrapperForImageClassification if classes else TimmWrapperModel

    def build() -> Any:
        with torch.device("meta"):
            return wrapper(TimmWrapperConfig.from_dict(values | {"model_args": arguments or None}, **labels))

    wrapped = build()
    built = _told(wrapped.timm_model)
    if other_values := {name: value for name, value in _told(model).items() if value != built.get(name)}:
        arguments |= other_values
        wrapped = build()
    # A checkpoint would be loaded into the model that timm builds.
    mine, other = _parts(model), _parts(wrapped.timm_model)
    if mine != other:
        name = sorted(key for key in mine.keys() | other.keys() if mine.get(key) != other.get(key))[0]
        raise ConfigError(
            f"timm model: {name} is {mine.get(name)}, but timm builds {other.get(name)} from its name and {arguments}; "
            "wrap it first: linearize.conversion.timm.wrap(model, model_args={the arguments of create_model})"
        )
    wrapped.timm_model = model
    wrapped.train(model.training)
    wrapped.config.architectures = [wrapper.__name__]
    return wrapped


_TOLD = {"global_pool": str, "dynamic_img_size": bool, "in_chans": int}
"""Arguments of `timm.create_model` that its models keep as attributes, and their types."""


def _told(model: nn.Module) -> Values:
    return {name: value for name, kind in _TOLD.items() if isinstance(value := getattr(model, name, None), kind)}


def _parts(model: nn.Module) -> dict[str, object]:
    """Return the shapes of a model's weights, and its layers in words, by name; without those that only drop."""
    layers = {name: f"{type(x).__name__}({x.extra_repr()})" for name, x in model.named_modules()}
    kept = {name: text for name, text in layers.items() if "Drop" not in text and not text.startswith("Identity")}
    return kept | {name: tuple(x.shape) for name, x in model.state_dict().items()}


def probe(model: PreTrainedModel, inputs: Mapping[str, Tensor | bool]) -> list[Call]:
    """Run a wrapped timm model once and return its attention calls in order.

    Raises:
        UnsupportedModelError: if no attention is called, although there are modules with such names.
    """
    watcher = _Watcher()
    with contextlib.ExitStack() as undo, torch.no_grad(), watcher:
        for module in list(model.modules()):
            undo.enter_context(module.register_forward_pre_hook(watcher.enter))
            undo.enter_context(module.register_forward_hook(watcher.leave, always_call=True))
            if getattr(module, "fused_attn", None) is False:
                # timm's switch between the fused function and the explicit formula.
                vars(module)["fused_attn"] = True
                undo.callback(setattr, module, "fused_attn", False)
            if (forward := form(type(module))) is not None:
                vars(module)["forward"] = types.MethodType(forward, module)
                undo.callback(delattr, module, "forward")
        model(**inputs)
    calls = watcher.calls
    if any(call.query[2] == call.key[2] for call in calls):
        return calls
    called = {id(call.module) for call in calls}
    unseen = [m for m in watcher.attentions if not any(id(inner) in called for inner in m.modules())]
    if unseen:
        raise UnsupportedModelError(
            f"timm's {model.config.architecture!r} has attention that cannot be reached: {_why_unseen(unseen)}; use a "
            "ViT, DeiT, EVA or DINO model"
        )
    return calls


_ATTENTIONS = re.compile("ttention|Attn|XCA|MHSA|GPSA|SHSA|LiteMLA")
_NO_ATTENTIONS = re.compile("Pool|Block|Split|SelectiveKernel|ChannelAttn|SpatialAttn|NonLocal")
"""Names of attentions between tokens, and of modules with similar names: gates of channels, containers."""


def _why_unseen(unseen: list[nn.Module]) -> str:
    """Describe the most common kind of attention that was not called."""
    kind = Counter(type(module) for module in unseen).most_common(1)[0][0]
    example, name = next(module for module in unseen if type(module) is kind), kind.__name__
    weights = [weight for weight, _ in (*example.named_parameters(), *example.named_buffers())]
    if _between_channels(example):
        return f"{name}, {_CHANNELS}"
    if any(word in name for word in _LINEAR):
        return f"{name} never compares two patches, which is already linear in their number"
    if any(word in weight for weight in weights for word in _BIASES):
        return f"{name} adds a position bias to the scores, which a kernel cannot honour"
    if "Talking" in name:
        return f"{name} mixes the scores of its heads, which a kernel cannot honour"
    return f"{name} computes softmax itself instead of calling torch's scaled_dot_product_attention"


_LINEAR = ("Factor", "Additive", "Linear", "LiteMLA")
_BIASES = ("attention_bias", "relative_position", "rel_pos", "relative_pos", "pos_proj", "cpb_mlp", "meta_mlp", "_rel")
_IN_WINDOWS = "attention inside windows of an image, which is already linear in their number"
_CHANNELS = "attention between channels, which is already linear in the number of patches"


def _between_channels(module: nn.Module) -> bool:
    name = type(module).__name__
    return "Channel" in name or "XCA" in name or "CrossCovariance" in name


class _Watcher(TorchFunctionMode):
    """Records scaled dot-product attentions, the modules that call them, and the attentions that ran by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.running: list[nn.Module] = []
        self.attentions: list[nn.Module] = []

    def enter(self, module: nn.Module, args: object) -> None:
        """Note that a module starts to run."""
        self.running.append(module)
        name = type(module).__name__
        if _ATTENTIONS.search(name) and not _NO_ATTENTIONS.search(name):
            self.attentions.append(module)

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        """Note that the module that started last has run."""
        self.running.pop()

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Values | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.running:
            self._note(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(
        self, q: Tensor, k: Tensor, v: Tensor, mask: object = None, p: object = 0, causal: object = 0, **named: object
    ) -> None:
        mask, causal = named.get("attn_mask", mask), named.get("is_causal", causal)
        q_shape, k_shape, v_shape = (((1,) * 4 + tuple(t.shape))[-4:] for t in (q, k, v))
        kind, module = "none" if mask is None else "bias", self.running[-1]
        # Five dimensions are windows and heads, in either order (Twins, Hiera, NesT).
        refused = _IN_WINDOWS if q.ndim > 4 else _CHANNELS if _between_channels(module) else ""
        self.calls.append(Call(module, q_shape, k_shape, v_shape, kind, "", bool(causal), refused=refused))
