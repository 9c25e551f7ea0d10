"""One step of stage one on one sequence, compared with a plain forward pass, full matrices, and the minimal work.

- "softmax": the frozen model's own forward pass through SDPA.
- "naive": per layer the two T x T matrices of the formula, and autograd through them, one layer at a time; scripts that
  hold the matrices of all layers at once need that many times the memory.
- "least": the forward pass, and only the matrix products that loss and gradient need, in blocks of rows: the scores,
  the kernel's products, and the gradients of both features.
- "step": a step of `linearize distill`, including the optimizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions, softmax_weights
from linearize.attention.layer import LinearAttention
from linearize.core.errors import ConfigError
from linearize.evaluation.bench.meter import Call
from linearize.evaluation.bench.models import OfModel
from linearize.evaluation.bench.rows import Row, ratio
from linearize.training.sharding import make_accelerator
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_one.observer import KernelTrainer, layer_loss

BLOCK_NUMBERS, LEAST_ROWS = 1 << 19, 128
"""Numbers per block of "least" (2 MiB of fp32, to stay in the cache), and the minimum number of rows per block."""

TINY = 1e-30


@dataclass(frozen=True)
class StageOneSuite(OfModel):
    """One step of stage one."""

    name: ClassVar[str] = "stage-one"
    variants: ClassVar[tuple[str, ...]] = ("softmax", "naive", "least", "step")
    pair: ClassVar[tuple[str, str]] = ("naive", "step")
    memory_variants: ClassVar[tuple[str, ...]] = ("softmax", "naive", "step")
    may_run_out_of_memory: ClassVar[tuple[str, ...]] = ("naive",)

    @property
    def what(self) -> str:
        return f"stage one, {self.model.label}, one step, {self.model.dtype}"

    def check(self) -> None:
        if self.model.batch != 1:
            raise ConfigError(f"batch: got {self.model.batch}, but stage one is measured on one sequence; leave it out")
        for layer in linear_attentions(self.model.linear).values():
            info = layer.mixer.info
            if not (layer.mixer.learnable and info.windowed) or self.model.hybrid.window is not None:
                raise ConfigError(
                    f"bench: stage one is measured for kernels with weights to learn and no window, got {layer.kernel}"
                    f"{'' if self.model.hybrid.window is None else ' with a window'}; choose another kernel"
                )

    def prepare(self, variant: str, tokens: int) -> Call:
        if variant == "softmax":
            return self.model.forward(tokens, observer=lambda *_: None)
        if variant == "least":
            return self.model.forward(tokens, observer=roofline(tokens))
        if variant == "naive":
            return self._naive(tokens)
        batches = itertools.repeat(self.model.inputs(tokens))
        trainer = self._trainer
        return lambda: trainer.step(batches, 1)

    @cached_property
    def _trainer(self) -> KernelTrainer:
        model, config = self._frozen(), DistillConfig()
        losses = [layer_loss(name, layer, config) for name, layer in linear_attentions(model).items()]
        return KernelTrainer(model, losses, config, make_accelerator(model))

    def _frozen(self) -> PreTrainedModel:
        """Return the model with everything frozen except the kernels."""
        model = self.model.linear.requires_grad_(False)
        for layer in linear_attentions(model).values():
            layer.train().requires_grad_(True)
        return model

    def _naive(self, tokens: int) -> Call:
        layers = linear_attentions(self._frozen()).values()
        optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()])
        forward = self.model.forward(tokens, observer=naive_loss)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            forward()
            optimizer.step()

        return step

    def figures(self, row: Row) -> dict[str, float | None]:
        """Return the minimal work's time divided by the step's, and the step's memory by that of a plain forward pass.

        Both memories include the kernels' parameters and the optimizer's two moments; `memory_ratio` includes the
        model's weights on both sides, `memory_ratio_above_weights` on neither.
        """
        layers = linear_attentions(self.model.linear).values()
        kernels = sum(p.nbytes for layer in layers for p in layer.parameters())
        weights = sum(p.nbytes for p in self.model.linear.parameters()) - kernels
        kept = 3 * kernels
        step, forward = row.memory("step"), row.memory("softmax")
        above = None if step is None else step + kept
        allowed = None if forward is None else forward + kept
        return {
            "share_of_least": row.times("least"),
            "forwards": row.times("step", over="softmax"),
            "weights_bytes": float(weights),
            "kernels_and_optimizer_bytes": float(kept),
            "memory_ratio": ratio(*(None if x is None else x + weights for x in (above, allowed))),
            "memory_ratio_above_weights": ratio(above, allowed),
        }


def naive_loss(layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> None:
    """Compute the mean cross-entropy of a layer's weights against softmax's and its gradient, with whole matrices."""
    target = softmax_weights(q, k, None, scaling=scaling, causal=layer.shape.causal).float()
    with torch.enable_grad():
        weights = layer.mixer.weights(q.detach(), k.detach(), scaling=scaling)
        loss = -(target * weights.clamp(min=TINY).log()).sum(dim=-1).mean()
        loss.backward()


def roofline(tokens: int) -> Callable[..., None]:
    """Return an observer that computes only the block products, on constant features and in reused memory."""
    spare: dict[str, Tensor] = {}
    rows = min(tokens, max(LEAST_ROWS, BLOCK_NUMBERS // tokens))

    def observe(layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> None:
        if not spare:
            info, config = layer.mixer.info, layer.mixer.config
            assert info.feature_dim is not None
            features = info.feature_dim(config, q.shape[-1])
            for name in ("phi_q", "phi_k", "grad_q", "grad_k"):
                spare[name] = torch.ones(tokens, features, device=q.device)
            for name in ("scores", "products"):
                spare[name] = torch.empty(rows * tokens, device=q.device)
        groups = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            queries, keys = q[0, head].float(), k[0, head // groups].float()
            for start in range(0, tokens, rows):
                stop = min(start + rows, tokens)
                seen = stop if layer.shape.causal else tokens
                _block(spare, queries[start:stop], keys[:seen], slice(start, stop))

    return observe


def _block(spare: dict[str, Tensor], q: Tensor, k: Tensor, part: slice) -> None:
    """Compute the four products of a block of rows: q [C, D], k [S, D]."""
    rows, seen = len(q), len(k)
    scores, products = (spare[name][: rows * seen].view(rows, seen) for name in ("scores", "products"))
    torch.mm(q, k.T, out=scores)
    torch.mm(spare["phi_q"][part], spare["phi_k"][:seen].T, out=products)
    torch.mm(products, spare["phi_k"][:seen], out=spare["grad_q"][part])
    # Halved each time, so that the sums stay finite.
    spare["grad_k"][:seen].addmm_(products.T, spare["phi_q"][part], beta=0.5)
