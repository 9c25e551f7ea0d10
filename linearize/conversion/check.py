"""Compare a converted model, with softmax in place of its kernels, with its original on one batch.

A host may do more with transformers' attention function and masks than a plan shows: a second call per layer, a mask
read elsewhere, sinks in layers that stay softmax. Once converted, it would differ from its original without warning,
and stage one would imitate something else.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from linearize.attention.cache import text_config
from linearize.attention.interface import observed, register_interface
from linearize.attention.mixer import IMPLEMENTATION
from linearize.conversion.attentions import Run
from linearize.conversion.inputs import Inputs
from linearize.core.errors import UnsupportedModelError
from linearize.modeling.compat import implementation_of, set_implementation, use_implementations
from linearize.modeling.model import evaluating
from linearize.modeling.plan import CALLED, LOCAL, OWN, LayerPlan, Plan

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5}
"""Largest difference due to rounding, as a share of the largest output; 5 % in half precision."""
PADDED = 2
"""Padding tokens in the second row."""


Recorded = tuple[PreTrainedModel, Inputs, Sequence[Tensor | None]]
"""A run of the original: the model, or a part of it that was run separately; keyword arguments of its forward; and its
floating point outputs, None for those that are not compared on this batch."""


def record(runs: Iterable[Run], longest: int | None = None, *, padded: bool = True) -> list[Recorded]:
    """Return runs of the original for `check`.

    Args:
        runs: trial runs of the original, not yet converted.
        longest: the most tokens for which layers that lose their window still compute the same.
        padded: whether to add padding if the model takes a padding mask; only for made-up inputs.
    """
    recorded: list[Recorded] = []
    for module, made in runs if longest is None or longest > PADDED else ():
        # Cut the rows to `longest` tokens.
        texts = {key: x for key, x in made.items() if torch.is_tensor(x) and x.ndim == 2 and not x.is_floating_point()}
        batch = made | {key: x[:, :longest] for key, x in texts.items()}
        with_padding = _with_padding(module, batch) if padded else None
        for inputs in (with_padding, batch):
            if inputs is None or not (outputs := _try_outputs(module, inputs)):
                continue
            known = _without_those_of_padding(module, inputs, outputs) if inputs is with_padding else outputs
            recorded.append((module, inputs, known))
    return recorded


def _without_those_of_padding(model: PreTrainedModel, batch: Inputs, outputs: list[Tensor]) -> list[Tensor | None]:
    """Replace outputs that a head reads from a padding token (GPT-2's multiple choice) with None.

    These are the outputs without a token dimension that change with the embeddings of padding.
    """
    mask, embeddings = batch["attention_mask"], None
    assert isinstance(mask, Tensor)
    with contextlib.suppress(NotImplementedError):
        embeddings = model.get_input_embeddings()

    def shift(module: object, args: object, embedded: Tensor) -> Tensor:
        fits = torch.is_tensor(embedded) and embedded.ndim == 3 and embedded.shape[:2] == mask.shape
        # Adding a constant would not do: layer norm removes it.
        return torch.where(mask[..., None].bool(), embedded, embedded.roll(1, -1)) if fits else embedded

    if embeddings is None:
        return list(outputs)
    with embeddings.register_forward_hook(shift):
        moved = _try_outputs(model, batch)
    kept: list[Tensor | None] = list(outputs)
    for index, (old, new) in enumerate(zip(outputs, moved, strict=False)):
        if _real(mask, old) is None and not _difference(old, new, []) <= TOLERANCE.get(old.dtype, 5e-2):
            kept[index] = None
    return kept


def _try_outputs(model: PreTrainedModel, batch: Inputs) -> list[Tensor]:
    with contextlib.suppress(Exception):
        return _outputs(model, batch)
    return []


def check(model: PreTrainedModel, recorded: Iterable[Recorded]) -> None:
    """Compare a converted model, with softmax in place of its kernels, with its recorded original.

    Raises:
        UnsupportedModelError: if its outputs differ.
    """
    # An observer that returns nothing leaves softmax's output.
    with observed(model, lambda *call: None):
        for one in recorded:
            if why := _why_differs(one):
                raise UnsupportedModelError(
                    f"{type(one[0]).__name__} {why}, so it is not converted; load it "
                    "again, as this object has been changed"
                )


def keep_parts(model: PreTrainedModel, layers: list[LayerPlan], runs: list[Run]) -> list[LayerPlan]:
    """Return the layers with softmax kept in separately run parts whose outputs would change once converted.

    Args:
        model: the original; it is not changed.
        layers: its layers, without kernels; those with a reason stay softmax.
        runs: its trial runs.
    """
    for part, inputs in runs:
        modules = set(part.modules())
        inside = {name for name, module in model.base_model.named_modules() if module in modules}
        free = [layer for layer in layers if not layer.reason and layer.module in inside]
        if part is model or not free:
            continue
        # No kernel is chosen yet; any name other than softmax's marks the layers that can be converted.
        chosen = tuple(layer if layer.reason else dataclasses.replace(layer, kernel="any") for layer in layers)
        recorded = record([(part, inputs)])
        with _as_converted(model, Plan("", model.config.model_type, chosen)):
            why = next(filter(None, map(_why_differs, recorded)), "")
        if why:
            kept = {x.module: dataclasses.replace(x, reason=why, host=(*x.host, OWN)) for x in free}
            layers = [kept.get(layer.module, layer) for layer in layers]
    return layers


@contextlib.contextmanager
def _as_converted(model: PreTrainedModel, plan: Plan) -> Iterator[None]:
    """Make a model attend like a converted one, with softmax in place of the kernels, inside the block."""
    register_interface()
    with contextlib.ExitStack() as undo:
        for holder in model.modules():
            config = getattr(holder, "config", None)
            if isinstance(config, PreTrainedConfig):
                undo.callback(set_implementation, config, implementation_of(config))
                undo.callback(setattr, holder, "config", config)
        for layer in plan.converted:
            direction, local = CALLED in layer.host, LOCAL in layer.host
            facts = {"shape": layer.shape, "declares_direction": direction, "local_as_full": local}
            host = vars(model.base_model.get_submodule(layer.module))
            host["linear_attention"] = SimpleNamespace(**facts, observer=lambda *call: None)
            undo.callback(host.pop, "linear_attention", None)
        use_implementations(model, plan, IMPLEMENTATION)
        yield


def why_not_built(kind: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    """Return why a class cannot be built from a config, as loading does; empty if it can. Uses no memory."""
    try:
        with torch.device("meta"):
            kind(copy.deepcopy(config))
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def _why_differs(recorded: Recorded) -> str:
    """Return how a model's outputs differ from the recorded ones by more than rounding; empty if they do not."""
    module, batch, before = recorded
    masked = "once its attention goes through linear attention's masks"
    try:
        after = _outputs(module, batch)
    except Exception as error:
        return f"no longer runs {masked} ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    masks = [x for key, x in batch.items() if key.endswith("attention_mask") and isinstance(x, Tensor) and x.ndim == 2]
    for old, new in zip(before, after, strict=False):
        if old is None:
            continue
        difference, allowed = _difference(old, new, masks), TOLERANCE.get(old.dtype, 5e-2)
        if not difference <= allowed:
            return (
                f"computes something else {masked} (with softmax in place of the kernels its outputs differ by "
                f"{difference:.2g} of the largest, expected at most {allowed:g})"
            )
    return ""


def _with_padding(model: PreTrainedModel, inputs: Inputs) -> Inputs | None:
    """Return a batch of two rows, the second with padding; None for models that read more than text."""
    ids, written = inputs.get("input_ids"), inputs.get("decoder_input_ids")
    tensors = {key for key, x in inputs.items() if torch.is_tensor(x)}
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not tensors <= {"input_ids", "decoder_input_ids"}:
        return None
    mask = torch.ones(2, ids.shape[1], dtype=torch.long, device=ids.device)
    mask[1, -PADDED:] = 0
    rows = ids.repeat(2, 1)
    # Heads that read the last token's state find the padding by its token id.
    pad = getattr(text_config(model.config), "pad_token_id", None)
    rows[1, -PADDED:] = rows[1, -PADDED:] if pad is None else pad
    decoder = {"decoder_input_ids": written.repeat(2, 1)} if isinstance(written, Tensor) else {}
    return inputs | {"input_ids": rows, "attention_mask": mask} | decoder


def _outputs(model: PreTrainedModel, batch: Inputs) -> list[Tensor]:
    """Return the floating point outputs of a forward in evaluation mode."""
    # The same random numbers each time: some models draw in evaluation too (ViT-MAE masks patches).
    with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs = model(**batch)
    if isinstance(outputs, Mapping):
        # Eager softmax's weights at padding are meaningless.
        outputs = {key: value for key, value in outputs.items() if not key.endswith("attentions")}
    return [x for x in tree_leaves(outputs) if torch.is_tensor(x) and x.is_floating_point()]


def _real(mask: Tensor, output: Tensor) -> Tensor | None:
    """Return a padding mask [B, T] in the shape of an output [B, T, ...]; None if they do not match."""
    if output.ndim < 2:
        return None
    if output.ndim > 2 and output.shape[1] == mask.shape[1] - 1:
        # Without the first token (CSM's codebooks).
        mask = mask[:, 1:]
    if output.ndim > 2 and output.shape[0] % mask.shape[0] == 0:
        # Several rows of outputs for one row of tokens (MusicGen's codebooks).
        mask = mask.repeat_interleave(output.shape[0] // mask.shape[0], dim=0)
    return mask.bool() if output.shape[:2] == mask.shape else None


def _difference(old: Tensor, new: Tensor, masks: list[Tensor]) -> float:
    """Return the largest difference of outputs at real tokens, as a share of the largest output there."""
    if old.shape != new.shape:
        return float("inf")
    real = next((found for mask in masks if (found := _real(mask, old)) is not None), None)
    if real is not None:
        old, new = old[real], new[real]
    known = torch.isfinite(old) & torch.isfinite(new)
    if not torch.equal(torch.isnan(old), torch.isnan(new)):
        return float("inf")
    if not bool(known.any()):
        return 0.0
    old, new = old[known].cpu().double(), new[known].cpu().double()
    return float((old - new).abs().max() / old.abs().max().clamp_min(1e-12))
