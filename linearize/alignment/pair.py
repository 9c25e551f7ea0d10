"""Teacher and student side by side: where their blocks are, and what each shows of a batch.

The teacher is run as a converted model whose layers compute softmax (see `linearize.teacher.observe`). So both get the
same masks and arguments, the student's blocks can be run on the teacher's inputs, and where only kernels are trained
teacher and student are one model.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions, observed
from linearize.attention.layer import LinearAttention
from linearize.errors import ConfigError
from linearize.fidelity.whole import check_original
from linearize.loading import move
from linearize.modeling.plan import Plan
from linearize.surgery.apply import apply
from linearize.teacher.observe import body_of, run_module, softmax_output

OUTPUT = "output"
"""Name of the last hidden state among the layers."""


@dataclass(frozen=True)
class Block:
    """A layer of the model with a converted attention in it.

    Attributes:
        name: of the block, from the model.
        attention: of the block's own child that holds the attention and what projects its output.
    """

    name: str
    attention: str


@dataclass
class Outputs:
    """What a model shows of a batch.

    Attributes:
        states: hidden states [B, T, C] after each block by the block's name, and `OUTPUT` last where the model has it.
        logits: by the name that the head gives them; [B, V], [B, T, V], or [B, T] over the tokens.
        mask: [B, T], true where there is a token; None: everywhere.
    """

    states: dict[str, Tensor] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)
    mask: Tensor | None = None

    @property
    def last(self) -> Tensor:
        """The last hidden state."""
        return next(reversed(self.states.values()))


def find_blocks(model: PreTrainedModel) -> list[Block]:
    """Return the blocks with a converted attention.

    A block is a member of a list of modules: the outermost one that holds no more than one converted attention (so of a
    model in stages the layers, not the stages).

    Raises:
        ConfigError: if an attention lies in no list of modules.
    """
    hosts = list(linear_attentions(model))
    found: dict[str, Block] = {}
    for host in hosts:
        parts = host.split(".")
        candidates = []
        for depth in range(1, len(parts)):
            inside, block = ".".join(parts[:depth]), ".".join(parts[: depth + 1])
            if isinstance(model.get_submodule(inside), (nn.ModuleList, nn.Sequential)):
                candidates.append(block)
        unshared = [name for name in candidates if sum(f"{other}.".startswith(f"{name}.") for other in hosts) == 1]
        if not candidates:
            raise ConfigError(
                f"alignment: the attention {host!r} lies in no list of layers, so its block is not known; "
                "skip the alignment (--align-steps 0)"
            )
        name = (unshared or candidates[-1:])[0]
        below = host.removeprefix(f"{name}.").split(".")[0] if host != name else ""
        found.setdefault(name, Block(name, f"{name}.{below}" if below else name))
    return list(found.values())


class Pair:
    """A student and its teacher.

    Attributes:
        student: the converted model that is trained.
        teacher: a converted model that is run with softmax; the student itself where only kernels are trained.
        blocks: of both.
    """

    def __init__(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        self.student, self.teacher = student, teacher
        self.blocks = find_blocks(student)

    @torch.no_grad()
    def teach(self, batch: Mapping[str, Tensor], *, head: bool) -> Outputs:
        """Run the teacher on a batch; with `head` for its logits too."""
        with self.softmax():
            return run(self.teacher, self.blocks, batch, head=head)

    def learn(self, batch: Mapping[str, Tensor], *, head: bool) -> Outputs:
        """Run the student on a batch, with gradients where they are enabled."""
        return run(self.student, self.blocks, batch, head=head)

    @contextlib.contextmanager
    def softmax(self) -> Iterator[None]:
        """Have the teacher compute softmax while the block runs."""
        with observed(self.teacher, _softmax):
            yield


def _softmax(
    layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
) -> Tensor | None:
    # The host's own way would make a T x T mask of a causal one with padding.
    return softmax_output(layer, q, k, v, mask, scaling) if layer.shape.causal else None


def run(model: PreTrainedModel, blocks: list[Block], batch: Mapping[str, Tensor], *, head: bool) -> Outputs:
    """Run a model on a batch and return what it shows."""
    found = Outputs(mask=batch.get("attention_mask"))
    handles = []

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            found.states[name] = first_tensor(output)

        return hook

    def keep_last(module: nn.Module, args: object, output: object) -> None:
        last = getattr(output, "last_hidden_state", None)
        # A model without a norm behind its last block returns that block's state.
        if torch.is_tensor(last) and not any(last is state for state in found.states.values()):
            found.states[OUTPUT] = last

    body = body_of(model)
    try:
        handles += [model.get_submodule(block.name).register_forward_hook(keep(block.name)) for block in blocks]
        handles.append(body.register_forward_hook(keep_last))
        output = run_module(model if head else body, model.config, batch)
    finally:
        for handle in handles:
            handle.remove()
    if head:
        found.logits = {
            name: value
            for name, value in getattr(output, "items", dict)()
            if name.endswith("logits") and torch.is_tensor(value) and value.is_floating_point()
        }
    return found


def first_tensor(output: object) -> Tensor:
    """Return the hidden state of what a block returned: itself, or the first of a tuple."""
    found = output[0] if isinstance(output, (tuple, list)) else output
    assert isinstance(found, Tensor)
    return found


def make_pair(student: PreTrainedModel, teacher: PreTrainedModel | None, *, shared: bool) -> Pair:
    """Put a student and its teacher side by side.

    Args:
        student: a converted model.
        teacher: its original, which is copied; None: the student's own weights under softmax, as they are now.
        shared: whether the student's weights stay as they are, so that it can be its own teacher.

    Raises:
        ConfigError: if the teacher does not fit.
    """
    if teacher is None:
        return Pair(student, student if shared else _frozen(copy.deepcopy(student)))
    check_teacher(student, teacher)
    made = copy.deepcopy(teacher)
    apply(made, Plan.from_dict(student.config.linearize))
    move(made, next(student.parameters()).device)
    return Pair(student, _frozen(made))


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    return model.eval().requires_grad_(False)


def check_teacher(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Refuse a teacher that cannot be the student's.

    Raises:
        ConfigError: if it is converted itself, of another architecture or size, or of another head or label set.
    """
    check_original(teacher, student, "teacher")
    mine, its = _sizes(student), _sizes(teacher)
    given = "give the model that the checkpoint was made from"
    # Positions may have been extended.
    for name in (name for name in mine if name in its and mine[name] != its[name] and "position" not in name):
        raise ConfigError(
            f"teacher: got a model of another size ({name}: {its[name]}, the student has {mine[name]}); {given}"
        )
    for name in sorted(name for name in mine.keys() ^ its.keys() if not name.startswith("pooler.")):
        whose = "the teacher lacks" if name in mine else "only the teacher has"
        raise ConfigError(f"teacher: got a model of other layers ({whose} the weight {name!r}); {given}")
    kind, other = (type(model).__name__.removeprefix("Linearized") for model in (student, teacher))
    if _has_head(student) and kind != other:
        raise ConfigError(
            f"teacher: got a {other}, but the student is a {kind}, whose logits it has to give; "
            "give a teacher with that head"
        )
    labels, others = (list((model.config.id2label or {}).values()) for model in (student, teacher))
    if _has_head(student) and "Classification" in kind and labels != others:
        raise ConfigError(
            f"teacher: got the labels {others[:5]}, but the student has {labels[:5]}; "
            "give a teacher of the same label set"
        )


def _sizes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the body's weights by name, without kernels."""
    named = model.base_model.named_parameters()
    return {name: tuple(parameter.shape) for name, parameter in named if ".linear_attention." not in name}


def _has_head(model: PreTrainedModel) -> bool:
    return body_of(model) is not model
