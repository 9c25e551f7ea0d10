"""The plan of a conversion, as data: what happens to each attention of a model. It is saved in the checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from torch import nn

from linearize.attention.parts import newest_part
from linearize.attention.shape import HeadShape
from linearize.core.errors import CheckpointError, ConfigError
from linearize.core.registry import HYBRID, PLAIN, Hybrid, ReadOnlyValues, Values, check, kernel_info

SOFTMAX = "softmax"
"""The kernel name of a layer that is not converted."""
LOCAL = "local mask"
"""Marks a host that attends inside a sliding window or chunks, and may be converted as full attention."""
OWN = "own attention"
"""Marks a host that keeps softmax because of its own code or masks; a part with only such hosts runs unchanged."""
OUTSIDE = "../"
"""Begins the name of an attention outside of the body, before its name in the whole model; it always stays softmax."""
ABSENT = "absent"
"""Key in config.json's section for the weights that the saved model was built without."""
UNKNOWN = HeadShape(1, 1, 1, 1, False)
"""Sizes of an attention that did not run in the trial run."""


def damaged(problem: str) -> CheckpointError:
    """Return the error for a config.json that no version of linearize could have written."""
    return CheckpointError(f"config.json: {problem}; the file is damaged or was edited: convert the model again")


@dataclass(frozen=True)
class LayerPlan:
    """The plan for one attention.

    Attributes:
        module: dotted name, from the base model (without the head); `OUTSIDE` and the name in the whole model for
            attentions in the head.
        index: number among the self-attentions that can be converted, in the order in which they run; None for others.
        kernel: the kernel's name, or "softmax" if the layer is not converted.
        shape: sizes and direction.
        arguments: the kernel's arguments that differ from its defaults, and those in `KernelInfo.legacy_defaults`.
        reason: why the layer keeps softmax.
        cache_index: index of the layer's state in a generation cache: the host's `layer_idx`. None if the host has no
            index, or if one state cannot serve it (it runs several times per token, say): all keys are then cached.
        hybrid: the layer's additions to the kernel, such as a softmax window.
        host: names of the host's attributes that agreed with `shape` and `cache_index` at conversion (see
            `host_facts`); a checkpoint is rejected if they no longer agree.
    """

    module: str
    index: int | None
    kernel: str
    shape: HeadShape
    arguments: Values = field(default_factory=dict)
    reason: str = ""
    cache_index: int | None = None
    hybrid: Hybrid = PLAIN
    host: tuple[str, ...] = ()

    @property
    def converted(self) -> bool:
        """Whether the layer gets a kernel."""
        return self.kernel != SOFTMAX

    @property
    def in_body(self) -> bool:
        """Whether it is in the body, the part of the model that a plan can change."""
        return not self.module.startswith(OUTSIDE)

    @property
    def mixer(self) -> tuple[str, Values, HeadShape, Hybrid]:
        """The arguments of `build_mixer` and `LinearAttention`, which fully determine the layer's computation."""
        return self.kernel, self.arguments, self.shape, self.hybrid

    def bare(self, kernel: str = SOFTMAX, reason: str = "") -> LayerPlan:
        """Return the layer with another kernel, or with softmax, without arguments."""
        return dataclasses.replace(self, kernel=kernel, arguments={}, hybrid=PLAIN, reason=reason)

    @classmethod
    def from_dict(cls, data: ReadOnlyValues) -> LayerPlan:
        """Build a layer from its entry in the data that `Plan.to_dict` returned.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: if something is missing or of the wrong kind.
        """
        known, got = {f.name for f in dataclasses.fields(cls)} - {"hybrid"} | {"window"}, set(data)
        # Checkpoints without a checksum also lack `host` (see `linearize.modeling.config.check_checksum`).
        _expect((got - (set(HYBRID) - {"window"})) | {"host"} == known, "keys of a layer", sorted(map(str, got)))
        values = {"host": (), **data}
        additions = {name: values.pop(name) for name in HYBRID if name in values}
        several = {name: tuple(x) for name, x in additions.items() if isinstance(getattr(PLAIN, name), tuple)}
        hybrid = Hybrid(**additions | several)
        shape, host = HeadShape(**values["shape"]), tuple(values["host"])
        layer = cls(**values | {"shape": shape, "host": host, "hybrid": hybrid})
        for part in (layer, hybrid):
            check(part, "layer")
        single = [x for name, x in additions.items() if not isinstance(getattr(PLAIN, name), tuple | str)]
        optional, more = [layer.index, layer.cache_index, *single], [x for own in several.values() for x in own]
        counts = [x for x in optional if x is not None] + more
        _expect(layer.module and all(map(_count, counts)), "module and numbers of a layer", [layer.module, *counts])
        # `host` lists known names, none twice, and exactly one of them says where the direction comes from.
        facts = set(host)
        one_direction = facts <= _FACTS and len(facts) == len(host) and len(facts & {"is_causal", CALLED, MASKED}) == 1
        _expect("host" not in got or one_direction, "host of a layer", host)
        if not layer.converted:
            bare = not layer.arguments and hybrid == PLAIN
            _expect(bare, "arguments of a layer that is not converted", layer.arguments)
            return layer
        _expect(layer.index is not None and not layer.reason, "index and reason of a converted layer", layer.index)
        legacy: Mapping[str, object] = {}
        # An unknown kernel is reported later, when it is built; so is a wrong argument.
        with contextlib.suppress(ConfigError):
            legacy = kernel_info(layer.kernel).legacy_defaults
        return dataclasses.replace(layer, arguments={**legacy, **layer.arguments})


@dataclass(frozen=True)
class Plan:
    """The plan for all attentions of a model.

    Attributes:
        architecture: class name of the model.
        base_model_type: `model_type` of its config.
        layers: the attentions, in the order in which they run.
        seed: seed of the kernels' initial values (layer i: seed + i).
    """

    architecture: str
    base_model_type: str
    layers: tuple[LayerPlan, ...]
    seed: int = 0

    @functools.cached_property
    def converted(self) -> tuple[LayerPlan, ...]:
        """The layers that get a kernel."""
        return tuple(filter(attrgetter("converted"), self.layers))

    @property
    def local_as_full(self) -> tuple[LayerPlan, ...]:
        """The layers that attended inside a window and are converted as full attention."""
        return tuple(layer for layer in self.converted if LOCAL in layer.host)

    def with_layers(self, changed: Iterable[LayerPlan]) -> Plan:
        """Return the plan with other layers in place of those with the same modules."""
        layers = {layer.module: layer for layer in (*self.layers, *changed)}
        return dataclasses.replace(self, layers=tuple(layers.values()))

    def to_dict(self) -> dict[str, object]:
        """Return plain data for config.json, without unused additions, so that older versions can read it.

        It has `format_version` if that is not 1.
        """
        layers = []
        for layer in self.layers:
            values = dataclasses.asdict(layer)
            del values["hybrid"]
            layers.append(values | {"window": layer.hybrid.window} | layer.hybrid.changed)
        names = {"base_model_type": self.base_model_type, "base_architecture": self.architecture}
        version = newest_part(layer.hybrid for layer in self.layers).since
        return {**({"format_version": version} if version > 1 else {}), **names, "seed": self.seed, "layers": layers}

    @classmethod
    def from_dict(cls, data: ReadOnlyValues) -> Plan:
        """Build a plan from the data that `to_dict` returned.

        Raises:
            CheckpointError: if something is missing or of the wrong kind.
        """
        try:
            layers = tuple(map(LayerPlan.from_dict, data["layers"]))
            plan = cls(data["base_architecture"], data["base_model_type"], layers, data["seed"])
            check(plan, "section")
            _expect(-(2**63) <= plan.seed < 2**63, "seed", plan.seed)
            # Convertible layers are numbered from 0, and no module occurs twice.
            numbers = [layer.index for layer in layers if layer.index is not None]
            _expect(numbers == list(range(len(numbers))), "numbers of the layers", numbers)
            modules = [layer.module for layer in layers]
            _expect(len(set(modules)) == len(modules), "a module occurs twice", modules)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            text = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise damaged(f"the 'linearize' section cannot be read ({text[:300]})") from None
        return plan


CALLED, MASKED = "is_causal argument", "mask"
"""How a host states its direction if its module does not: at every call, or only by its mask."""


def _planned(shape: HeadShape, cache_index: int | None) -> dict[str, object]:
    """Return the expected values of the attributes in which attention modules state their sizes and direction."""
    return {
        "is_causal": shape.causal,
        **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads"), shape.heads),
        "num_key_value_heads": shape.key_heads,
        "num_key_value_groups": shape.heads // shape.key_heads,
        **dict.fromkeys(("head_dim", "attention_head_size"), shape.head_dim),
        "layer_idx": cache_index,
    }


_ATTRIBUTES = tuple(_planned(UNKNOWN, None))
_FACTS = {*_ATTRIBUTES, CALLED, MASKED, LOCAL, OWN}
"""The names that `LayerPlan.host` can have."""


def _stated(host: nn.Module) -> dict[str, object]:
    # Modules without a direction are bidirectional, as in transformers' own attention functions.
    direction = {"is_causal": bool(getattr(host, "is_causal", False))}
    return {name: getattr(host, name) for name in _ATTRIBUTES if hasattr(host, name)} | direction


def host_facts(host: nn.Module, shape: HeadShape, cache_index: int | None) -> tuple[str, ...]:
    """Return the names of a host's attributes that agree with `shape` and `cache_index`."""
    stated, planned = _stated(host), _planned(shape, cache_index)
    return tuple(name for name in planned if name in stated and stated[name] == planned[name])


def contradiction(host: nn.Module, layer: LayerPlan) -> str:
    """Describe the first fact of a plan that the host's module now contradicts; empty if there is no contradiction."""
    stated, planned = _stated(host), _planned(layer.shape, layer.cache_index)
    for name in layer.host:
        if name in stated and stated[name] != planned[name]:
            return f"{name} is {planned[name]}, but the model's is {stated[name]}"
    return ""


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _expect(good: object, name: str, got: object) -> None:
    if not good:
        raise ValueError(f"{name}: got {repr(got)[:200]}")
