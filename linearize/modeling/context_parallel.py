"""One long row over several processes: each has a part of its tokens, and layers exchange only sums and near keys.

A part's keys are for all others a state of constant size, so a layer gathers that of every process, and with a window
the W keys around each border: as much for a million tokens as for a thousand. Causally a process adds up the states
before it (a prefix sum), bidirectionally all but its own. The keys next to a part get softmax weights from it, so their
process also gives the sum without them: nothing is subtracted.

Only forward passes and their gradients are computed in this way. Softmax would need all keys, so layers and heads that
keep it are refused, and so is stage one, whose target is softmax.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as _dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from linearize.attention.call import AttentionCall, MixerState
from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.attention.mixer import Mixer
from linearize.attention.parts import SCALED, check_parts
from linearize.core.errors import ConfigError, UnsupportedModelError
from linearize.modeling.model import evaluating
from linearize.modeling.plan import Plan
from linearize.ops import gather_keys
from linearize.ops.state import Context, LinearOptions, State, empty_state, real_tokens

dist: ModuleType = _dist
"""Its functions are missing where torch was built without them."""
HANDLED = SCALED | {"window", "sinks"}
"""The parts of a layer that are computed over several processes."""
PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
STEADY = (None, "default", "linear", "yarn", "llama3", "proportional", "ntk_alpha")
"""Types of rotary positions, as transformers names them, that do not change with the length of the row."""
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest deviation of the hidden states in the trial run, relative to their size; 0.05 for half precision."""


class _Gather(torch.autograd.Function):
    """Stack the vectors of all processes; each gets the sum of what all of them make of its own."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, group: object) -> Tensor:
        """Return [processes, N] of x [N]."""
        ctx.group = group
        every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, x, group=group)
        return torch.stack(every)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this process's vector."""
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


class _After(torch.autograd.Function):
    """An output whose gradient passes through what was gathered, also in a process that has used nothing of it.

    Otherwise the others would wait for its part of the sum.
    """

    @staticmethod
    def forward(ctx: Context, out: Tensor, every: Tensor) -> Tensor:
        """Return the output."""
        ctx.save_for_backward(every)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output's gradient, and none for the rest."""
        return grads[0], torch.zeros_like(ctx.saved_tensors[0])


class ContextParallel:
    """Computes the layers of a converted model for one part of a row; `context_parallel` returns it.

    Attributes:
        rank: number of this process in the group, which is the number of its part.
        size: number of processes.
        sent: bytes that this process has given to others so far.
    """

    def __init__(self, group: object = None) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.sent, self.first_position = 0, 0

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied with a model, which would still compute parts when the block is over."""
        self.refuse("a copy of the model")

    def part(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this process's tokens of a model's inputs, with their positions.

        Args:
            inputs: `input_ids` [B, N] and what else has a number per token, the same in every process.

        Raises:
            ConfigError: for other inputs, and for fewer tokens than processes need.
        """
        if "input_ids" not in inputs or inputs.keys() - set(PER_TOKEN):
            got, more = ", ".join(sorted(inputs)) or "nothing", ", ".join(PER_TOKEN[1:])
            raise ConfigError(f"context parallel: got {got}, expected input_ids and, of other inputs, {more}")
        tokens = inputs["input_ids"].shape[1]
        if tokens < 2 * self.size:
            raise ConfigError(
                f"context parallel: got {tokens} tokens for {self.size} processes, expected at least 2 for each"
            )
        places = torch.arange(tokens, device=inputs["input_ids"].device) + self.first_position
        whole = {"position_ids": places.expand(len(inputs["input_ids"]), -1), **inputs}
        # As even as possible, the longer ones first.
        return {name: x.tensor_split(self.size, dim=1)[self.rank] for name, x in whole.items()}

    def refuse(self, what: str) -> NoReturn:
        """Refuse a call that is not built.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"context parallel: got {what}, expected a plain forward; leave the block for it")

    def attend(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, None]:
        """Mix this part's q [B, H, T, D], k [B, K, T, D], v [B, K, T, V] with all parts -> [B, H, T, V].

        Raises:
            ConfigError: if a part has fewer tokens than the window reaches, if padding is not at the end of the rows,
                or for a call with a generation cache.
        """
        if call.needs_state:
            self.refuse("a generation cache (use_cache=True)")
        q, k, v, scaling, tokens = call.q, call.k, call.v, call.scaling, call.k.shape[2]
        causal, sinks, (reach, least) = mixer.shape.causal, mixer.hybrid.sinks, _reach(mixer)
        real = real_tokens(k, call.key_padding_mask)
        before = self._tokens_before(real, least)
        # The first tokens of the row, the last ones of a part and its first ones.
        near = slice(0, sinks), slice(tokens - reach, tokens), slice(0, 0 if causal else reach)
        keys = [(k[:, :, cut], v[:, :, cut], real[:, None, cut, None]) for cut in near]
        every, whole = self._gather([*self._states(mixer, call, real, reach), *(x for part in keys for x in part)])

        def given(process: int, part: int) -> tuple[Tensor, ...]:
            k, v, there = every[process][2 + 3 * part : 5 + 3 * part]
            return k, v, there[:, 0, :, 0].bool()

        seen = [given(0, 0), given(self.rank - 1, 1)] if self.rank else []
        skipped = sum(x[0].shape[2] for x in seen)
        seen.append((k, v, real))
        seen += [given(self.rank + 1, 2)] if self.rank + 1 < self.size else []
        k, v, real = (torch.cat(x, dim=1 if x[0].ndim == 2 else 2) for x in zip(*seen, strict=True))
        q = F.pad(q, (0, 0, skipped, k.shape[2] - skipped - tokens))
        state: MixerState | None = None
        if (far := self._far(every, causal)) is not None:
            state = {"kv": far.kv, "log_scale": far.log_scale}
            if causal and mixer.window is not None:
                # After one token of padding, all else of a state is empty.
                one, two, three = (x[:, :, :1].detach() for x in (q, k, v))
                padding = torch.zeros_like(real[:, :1])
                with torch.no_grad():
                    empty = mixer(AttentionCall(one, two, three, scaling, padding, needs_state=True))[1]
                state = empty | state
            if mixer.counts:
                state["seen"] = before.float() - skipped
        call = AttentionCall(q, k, v, scaling, None if bool(real.all()) else real, None, state)
        out: Tensor = mixer(call)[0][:, :, skipped : skipped + tokens]
        return _After.apply(out, whole), None

    def _gather(self, tensors: list[Tensor]) -> tuple[list[list[Tensor]], Tensor]:
        """Return the tensors of every process, with a gradient, and what they are all cut from.

        They travel together: sums that processes wait for must come in the same order in all of them.
        """
        flat = torch.cat([x.float().flatten() for x in tensors])
        self.sent += flat.element_size() * flat.numel()
        whole: Tensor = _Gather.apply(flat, self.group)
        cuts = [row.split([x.numel() for x in tensors]) for row in whole]
        return [[y.view(x.shape).to(x.dtype) for x, y in zip(tensors, cut, strict=True)] for cut in cuts], whole

    def _tokens_before(self, real: Tensor, least: int) -> Tensor:
        """Return the number of tokens [B] before this part, given which are `real` [B, T]; check all parts."""
        ordered = (real[:, 1:] <= real[:, :-1]).all()
        facts = torch.cat([real.sum(dim=1), torch.tensor([real.shape[1], int(ordered)], device=real.device)])
        every = [torch.empty_like(facts) for _ in range(self.size)]
        self.sent += facts.element_size() * facts.numel()
        dist.all_gather(every, facts, group=self.group)
        table = torch.stack(every)
        counts, lengths = table[:, :-2], table[:, -2]
        if int(lengths.min()) < least:
            raise ConfigError(
                f"context parallel: got a part of {int(lengths.min())} tokens, expected at least {least}, as "
                "far as the layers' windows and sinks reach; use longer rows or fewer processes"
            )
        ended = (counts < lengths[:, None])[:-1] & (counts[1:] > 0)
        if not bool(table[:, -1].all()) or bool(ended.any()):
            raise ConfigError(
                "context parallel: got padding before or between tokens, expected it at the end of the rows; set "
                'tokenizer.padding_side = "right"'
            )
        return counts[: self.rank].sum(dim=0)

    def _states(self, mixer: FeatureMapMixer, call: AttentionCall, real: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """Return the kernel's states of the part's keys: the sums [3, B, K, F, V + 1] and their log-scales [3, B, K].

        They are of the keys that the process before sees near it, of those that no process does, and of those that the
        next one does; none is of a sink.
        """
        tokens, first = call.k.shape[2], mixer.hybrid.sinks if self.rank == 0 else 0
        features = mixer.map_tokens(call.without_padding()[1], call.scaling)
        options = mixer.options(call, features.log_scale)
        head = first if mixer.shape.causal else first + reach
        states = []
        for start, end in ((first, head), (head, tokens - reach), (tokens - reach, tokens)):
            phi, v, scale = features.phi[:, :, start:end], call.v[:, :, start:end], features.log_scale
            scale = None if scale is None else scale[..., start:end]
            if start < end:
                more: LinearOptions = {"key_padding_mask": real[:, start:end], "log_scale": scale}
                states.append(gather_keys(phi, v, **options | more))
            else:
                states.append(empty_state(phi, v, scaled=scale is not None, normalize=mixer.keys.normalize))
        return torch.stack([state.kv for state in states]), torch.stack([state.log_scale for state in states])

    def _far(self, every: list[list[Tensor]], causal: bool) -> State | None:
        """Return the state of the keys of other processes that are far from this part; None if it has no others."""
        far: list[tuple[Tensor, Tensor]] = []
        for other in range(self.rank if causal else self.size):
            wanted = other != self.rank + 1, True, other != self.rank - 1
            kv, log_scale = every[other][:2]
            far += [(kv[i], log_scale[i]) for i in range(3) if wanted[i] and other != self.rank]
        if not far:
            return None
        level = torch.stack([own for _, own in far]).amax(dim=0)
        return State(torch.stack([kv * torch.exp(own - level)[..., None, None] for kv, own in far]).sum(dim=0), level)


def _reach(mixer: Mixer) -> tuple[int, int]:
    """Return how many tokens a window reaches to one side, and the fewest tokens of a part."""
    window, causal = mixer.hybrid.window, mixer.shape.causal
    reach = 0 if window is None else window - 1 if causal else window // 2
    return reach, max(2, (1 if causal else 2) * reach + mixer.hybrid.sinks)


@contextlib.contextmanager
def context_parallel(model: PreTrainedModel, group: object = None) -> Iterator[ContextParallel]:
    """Inside the block, the processes of a group run a converted model together, each on its part of every row.

        with linearize.context_parallel(model) as parallel:
            hidden = model(**parallel.part(tokenizer(text, return_tensors="pt"))).last_hidden_state

    The output is that of the part. A gradient reaches this process's inputs and weights; those of the weights have to
    be added up over the processes. The model is tried on a short row first.

    Args:
        model: a converted model on this process's device, with the same weights in all processes.
        group: the processes; None for all.

    Raises:
        ConfigError: without several processes, or for a layer with a part that needs all keys.
        UnsupportedModelError: if the model computes something else in parts, as one that mixes tokens outside of its
            converted attentions does.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "context parallel: got one process, expected those of torchrun; call torch.distributed.init_process_group()"
        )
    layers = linear_attentions(model)
    check_layers(model, layers)
    parallel, text = ContextParallel(group), model.config.get_text_config()
    cached = getattr(text, "use_cache", None)
    try:
        if cached:
            text.use_cache = False
        _try(model, layers, parallel)
        yield parallel
    finally:
        if cached:
            text.use_cache = cached
        for layer in layers.values():
            layer.across = None


def check_layers(model: PreTrainedModel, layers: Mapping[str, LinearAttention]) -> None:
    """Check that a model's layers can be computed in parts.

    Raises:
        ConfigError: naming the first that cannot.
    """
    section = getattr(model.config, "linearize", None)
    if section is None:
        raise ConfigError(f"context parallel: got {type(model).__name__}, expected a converted model; convert it first")
    kept = [layer.module for layer in Plan.from_dict(section).layers if not layer.converted]
    if kept:
        raise ConfigError(
            f"context parallel: got softmax in {kept[0]}, which needs all keys, expected only converted layers; "
            "convert them all"
        )
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, Mapping) else [kinds]:
            if kind not in STEADY:
                # A short row, as it is tried, would not show it.
                raise ConfigError(
                    f"context parallel: got rotary positions of type {kind!r} in {name}, which change with the length "
                    "of the row, expected those of single tokens; compute such rows in one process"
                )
        if getattr(module, "attn_temperature_tuning", False):
            # Llama 4 counts the tokens of its input itself, and only those after several thousands make a difference.
            raise ConfigError(
                f"context parallel: got a temperature that grows with a token's place in {name}, which each part would "
                "count from its own start, expected none; compute such rows in one process"
            )
    for name, layer in layers.items():
        mixer = layer.mixer
        if layer.across is not None:
            layer.across.refuse("a block inside a block")
        check_parts(layer.hybrid, HANDLED, "context parallel")
        known = isinstance(mixer, FeatureMapMixer) and mixer.inputs is None and not mixer.floor
        if not known or mixer.info.positional:
            raise ConfigError(
                f"context parallel: got kernel {layer.kernel!r} in {name}, expected one with a feature map of single "
                "tokens, without places and without a floor for its denominators, such as hedgehog"
            )


@torch.no_grad()
def _try(model: PreTrainedModel, layers: Mapping[str, LinearAttention], parallel: ContextParallel) -> None:
    """Compare this part of a short row with the whole of it; find out how the model numbers its first token."""
    body = model.base_model
    least = max(_reach(layer.mixer)[1] for layer in layers.values())
    tokens, device = parallel.size * (least + 1), model.device
    draw = torch.Generator().manual_seed(0)
    table: Any = model.get_input_embeddings()
    size = table.num_embeddings
    ids = torch.randint(min(5, size - 1), size, (1, tokens), generator=draw).to(device)
    deviations = {}
    with evaluating(model):
        whole = body(input_ids=ids)[0].float()
        for layer in layers.values():
            layer.across = parallel
        want = whole.tensor_split(parallel.size, dim=1)[parallel.rank]
        # RoBERTa counts from the number of its padding token on.
        for first in dict.fromkeys((0, (getattr(model.config, "pad_token_id", None) or 0) + 1)):
            parallel.first_position = first
            got = body(**parallel.part({"input_ids": ids}))[0].float()
            worst = (got - want).norm() / want.norm()
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=parallel.group)
            deviations[first] = float(worst)
    parallel.sent = 0
    parallel.first_position = min(deviations, key=lambda first: deviations[first])
    if not deviations[parallel.first_position] <= CLOSE.get(model.dtype, 0.05):
        raise UnsupportedModelError(
            f"context parallel: got hidden states of {type(model).__name__} that differ by "
            f"{deviations[parallel.first_position]:.2g} in parts, expected the same; it mixes tokens outside of its "
            "converted attentions, or numbers them in its own way"
        )
