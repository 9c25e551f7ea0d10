"""A student and its teacher: their blocks, and their hidden states and logits for a batch.

The teacher runs as a converted model whose layers compute softmax. So both get the same masks and arguments, and the
student's blocks can run on the teacher's inputs. If only kernels are trained, teacher and student are one model.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions, observed
from linearize.attention.layer import LinearAttention, Mask
from linearize.checkpoint.loading import move
from linearize.conversion.plan import apply
from linearize.core.errors import ConfigError
from linearize.fidelity.measure import check_original
from linearize.fidelity.teacher import body_of, frozen_output, run_body
from linearize.modeling.model import is_linearized
from linearize.modeling.plan import Plan
from linearize.modeling.weights import device_of

OUTPUT = "output"
"""Name of the last hidden state among the layers."""


@dataclass
class Outputs:
    """A model's outputs for a batch.

    Attributes:
        states: hidden states [B, T, C] (of a grid [B, H, W, C]) after each block by the block's name, and `OUTPUT` last
            if the model has it.
        logits: logits by their names in the head's output; [B, 1, V], [B, T, V], [B, H, W, V] of an image, or [B, T]
            over the tokens.
        masks: of a teacher, the padding masks [B, T], true at tokens, that the attentions of its blocks got, by the
            block's name.
    """

    states: dict[str, Tensor] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)
    masks: dict[str, Tensor] = field(default_factory=dict)

    @property
    def last(self) -> Tensor:
        """The last hidden state [B, T, C]; a grid [B, H, W, C] is flattened."""
        state = next(reversed(self.states.values()))
        return state if state.ndim == 3 else state.flatten(1, -2)

    @property
    def last_mask(self) -> Tensor | None:
        """The padding mask [B, T] of the last hidden state, that of the last block; None if there is no padding."""
        name = next((name for name in reversed(self.states) if name != OUTPUT), OUTPUT)
        return self.masks.get(name)


def find_blocks(model: PreTrainedModel) -> dict[str, str]:
    """Return the blocks with a converted attention: {name of the block: name of its child with the attention}.

    That child is a direct one, which also has the attention's output projection; or it is the block itself.

    A block is a member of a list of modules: the outermost one with only one converted attention (in a model with
    stages: the layers, not the stages); it and its child run as modules, which a `ModuleList` does not.

    Raises:
        ConfigError: if an attention is not inside a list of modules.
    """
    hosts = list(linear_attentions(model))
    blocks: dict[str, str] = {}
    for host in hosts:
        # "a.b.c" is inside "a.b", which is inside "a".
        nested = list(accumulate(host.split("."), "{}.{}".format))
        lists = (nn.ModuleList, nn.Sequential)
        candidates = [name for above, name in pairwise(nested) if isinstance(model.get_submodule(above), lists)]
        children = {name: nested[nested.index(name) + 1] if name != host else name for name in candidates}
        unshared = [name for name in candidates if sum(f"{other}.".startswith(f"{name}.") for other in hosts) == 1]
        # A `ModuleList` has no forward.
        silent = {path for path in nested if isinstance(model.get_submodule(path), nn.ModuleList)}
        called = [name for name in unshared if silent.isdisjoint((name, children[name]))]
        if not candidates:
            raise ConfigError(
                f"alignment: the attention {host!r} is not inside a list of layers, so its block is not known; "
                "skip the alignment (--align-steps 0)"
            )
        name = (called or candidates[-1:])[0]
        blocks.setdefault(name, children[name])
    return blocks


@contextlib.contextmanager
def noting(
    model: nn.Module, blocks: Iterable[str], batch: Mapping[str, Tensor], padded: dict[str, bool]
) -> Iterator[dict[str, Tensor]]:
    """Let a model compute softmax (`frozen_output`) and note the padding masks [B, T] of its blocks by their names.

    Each block has its own: the towers of a model may have equally many tokens. Attentions get no mask in a batch
    without padding, so whether its mask is theirs is known from batches with padding, until then from its length.

    Args:
        model: the model.
        blocks: names of its blocks.
        batch: what it will read.
        padded: whether the batch's mask is that of a block, by name; kept from batch to batch.
    """
    masks: dict[str, Tensor] = {}
    hosts = linear_attentions(model)
    block_of = {hosts[host]: name for name in blocks for host in hosts if f"{host}.".startswith(f"{name}.")}
    given = batch.get("attention_mask")
    whole = given is not None and given.ndim == 2 and bool(given.all())

    def observe(layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scaling: float) -> Tensor | None:
        if (name := block_of.get(layer)) is not None:
            if given is not None and not whole:
                padded[name] = mask is not None
            elif given is not None and given.shape == (q.shape[0], q.shape[2]) and padded.get(name, True):
                mask = given
            if mask is not None:
                masks[name] = mask
        return frozen_output(layer, q, k, v, mask, scaling)

    with observed(model, observe):
        yield masks


@contextlib.contextmanager
def hooked(model: nn.Module, hooks: Mapping[str, Callable[..., None]]) -> Iterator[None]:
    """Register forward hooks (module, args, kwargs, output) by module name, and remove them afterwards."""
    with contextlib.ExitStack() as stack:
        for name, hook in hooks.items():
            stack.enter_context(model.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
        yield


def keeper(states: dict[str, Tensor], name: str, *, first: bool = False) -> Callable[..., None]:
    """Return a hook that keeps a module's state [B, T, C] under a name: of its last call, or with `first` its first."""

    def hook(module: nn.Module, args: object, kwargs: object, output: object) -> None:
        if not (first and name in states):
            states[name] = state_of(module, output)

    return hook


def run(model: PreTrainedModel, blocks: Iterable[str], batch: Mapping[str, Tensor], *, head: bool) -> Outputs:
    """Run a model on a batch (such as `input_ids` [B, T]) and return its hidden states; with `head` its logits too."""
    outputs, body = Outputs(), body_of(model)

    def keep_last(module: nn.Module, args: object, kwargs: object, output: object) -> None:
        last = getattr(output, "last_hidden_state", None)
        # A model without a norm after its last block returns that block's state.
        known = [(state.data_ptr(), state.numel()) for state in outputs.states.values()]
        if torch.is_tensor(last) and (last.data_ptr(), last.numel()) not in known:
            outputs.states[OUTPUT] = state_of(body, last)

    hooks = {name: keeper(outputs.states, name) for name in blocks}
    with hooked(model, hooks), hooked(body, {"": keep_last}):
        result = run_body(model, batch, head=head)
    if head:
        for name, value in getattr(result, "items", dict)():
            if not name.endswith("logits") or not torch.is_tensor(value) or not value.is_floating_point():
                continue
            if name == "logits" and value.ndim == 2 and value.shape[1] == getattr(model.config, "num_labels", None):
                if getattr(model.config, "problem_type", None) == "multi_label_classification":
                    value = label_choices(value)
                # [B, V] as [B, 1, V], which cannot be taken for logits over V tokens.
                value = value[:, None]
            if value.ndim == 4 and value.shape[1] == getattr(model.config, "num_labels", None) != value.shape[-1]:
                value = value.movedim(1, -1)
            outputs.logits[name] = value
    return outputs


def widths(module: nn.Module) -> set[int]:
    """Return the sizes of a module's weights without its kernels, of which the channels of its output have one."""
    named = module.named_parameters()
    return {parameter.shape[0] for name, parameter in named if parameter.ndim and "linear_attention." not in name}


def channels_last(image: Tensor, known: Collection[int]) -> Tensor:
    """Return an image [B, C, H, W] or [B, H, W, C] with its channels last; a tensor of other axes unchanged.

    Args:
        image: the image.
        known: numbers that its channels may have. If they decide nothing, the image is taken to be square.

    Raises:
        ConfigError: if both axes may be the channels.
    """
    if image.ndim != 4:
        return image
    _, first, middle, last = image.shape
    moved, right = first in known, last in known
    if moved == right:
        moved, right = middle == last, first == middle
    if moved == right:
        raise ConfigError(
            f"hidden states: got an image of the axes {list(image.shape)}, either the second or the last of which are "
            "its channels; give images of another size, or skip the training on hidden states (--align-steps 0)"
        )
    return image.movedim(1, -1) if moved else image


def label_choices(logits: Tensor) -> Tensor:
    """Return the logits [B V, 2] of separate choices, each between a label and nothing, from those of labels [B, V]."""
    return torch.stack([logits, torch.zeros_like(logits)], dim=-1).flatten(0, 1)


def state_of(module: nn.Module, output: object) -> Tensor:
    """Return the hidden state [B, T, C] or [B, H, W, C] in a module's output: that, or the first member of a tuple.

    Raises:
        ConfigError: as `channels_last` does.
    """
    state = output[0] if isinstance(output, (tuple, list)) else output
    assert isinstance(state, Tensor)
    return channels_last(state, widths(module)) if state.ndim == 4 else state


def make_teacher(
    student: PreTrainedModel, teacher: PreTrainedModel | None, *, shared: bool, frozen: Collection[str] = ()
) -> PreTrainedModel:
    """Return a student's teacher: a converted model that runs with softmax.

    Args:
        student: a converted model.
        teacher: its original, which is copied; None for the student's current weights under softmax.
        shared: whether the student's other weights do not change, so that it can be its own teacher.
        frozen: names of the student's weights that do not change; where equal, the teacher has them in the same memory.

    Raises:
        ConfigError: if the teacher does not fit.
    """
    if teacher is None and shared:
        return student
    # Parameters of its own: the student's may be given another dtype.
    same = {name: nn.Parameter(student.get_parameter(name).detach(), requires_grad=False) for name in frozen}
    if teacher is None:
        memo: dict[int, object] = {id(student.get_parameter(name)): parameter for name, parameter in same.items()}
        return copy.deepcopy(student, memo).eval().requires_grad_(False)
    check_teacher(student, teacher)
    converted = copy.deepcopy(teacher)
    apply(converted, Plan.from_dict(student.config.linearize))
    share(converted, same)
    move(converted, device_of(student))
    return converted.eval().requires_grad_(False)


def share(teacher: nn.Module, same: Mapping[str, nn.Parameter]) -> None:
    """Replace a teacher's weights by those with their names in `same` that are equal, so that they exist once."""
    for name, parameter in list(teacher.named_parameters(remove_duplicate=False)):
        own = same.get(name)
        if own is not None and own.dtype == parameter.dtype and torch.equal(own, parameter.to(own.device)):
            module, _, leaf = name.rpartition(".")
            setattr(teacher.get_submodule(module), leaf, own)


def check_teacher(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Check that a model can be the student's teacher.

    Raises:
        ConfigError: if it is converted, or has another architecture, size, head or label set, or if the student is not
            converted.
    """
    if not is_linearized(student):
        raise ConfigError(
            f"teacher: got a {type(student).__name__} to train, expected a converted model; convert it first: "
            "linearize convert, or tune it without a teacher"
        )
    check_original(teacher, student, "teacher")
    mine, theirs = _sizes(student), _sizes(teacher)
    for name in sorted(mine.keys() | theirs.keys()):
        got, expected = theirs.get(name), mine.get(name)
        # Positions may have been extended, and a pooler may be missing.
        free = "position" in name if got and expected else name.startswith("pooler.")
        if got != expected and not free:
            raise ConfigError(
                f"teacher: got a model of another size ({name}: {got or 'missing'}, the student has "
                f"{expected or 'none'}); give the model that the checkpoint was made from"
            )
    if body_of(student) is student:
        return
    kind, other = (type(model).__name__ for model in (student, teacher))
    if kind != other:
        raise ConfigError(
            f"teacher: got a {other}, but the student is a {kind} and needs its logits; give a teacher with that head"
        )
    labels, others = (list((model.config.id2label or {}).values()) for model in (student, teacher))
    if "Classification" in kind and labels != others:
        raise ConfigError(
            f"teacher: got the labels {others[:5]}, the student has {labels[:5]}; give a teacher with the same labels"
        )


def _sizes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the body's weights by name, without kernels."""
    named = model.base_model.named_parameters()
    return {name: tuple(parameter.shape) for name, parameter in named if ".linear_attention." not in name}
