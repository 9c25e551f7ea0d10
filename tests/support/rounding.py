"""The same PyTorch code in fp64: a reference without fp32's rounding, and how far that rounding leads from it."""

import copy

import torch
from torch.overrides import TorchFunctionMode

UNIT = 2.0**-24
"""fp32's unit roundoff u: the largest relative error of one rounding."""

CONFIDENCE = 5.0
"""lambda in `allowed`."""


class InDouble(TorchFunctionMode):
    """Code that asks for fp32 gets fp64; with a generator, every result and every gradient is moved by one roundoff."""

    def __init__(self, generator=None, roundings=1.0):
        super().__init__()
        self.generator, self.roundings = generator, roundings

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        swap = lambda x: torch.float64 if x is torch.float32 else x  # noqa: E731
        found = func(*map(swap, args), **{name: swap(x) for name, x in (kwargs or {}).items()})
        name = getattr(func, "__name__", "")
        changes = name.endswith("_") or name == "__get__"
        if self.generator is None or changes or not isinstance(found, torch.Tensor) or found.dtype != torch.float64:
            return found
        return Moved.apply(found, self.generator, self.roundings)


class Moved(torch.autograd.Function):
    """Change every number by a random part of one roundoff, and every number of its gradient."""

    @staticmethod
    def forward(ctx, x, generator, roundings):
        ctx.generator, ctx.roundings = generator, roundings
        return moved(x, generator, roundings)

    @staticmethod
    def backward(ctx, grad):
        return moved(grad, ctx.generator, ctx.roundings), None, None


def moved(x, generator, roundings=1.0):
    drawn = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device)
    return x * (1 + roundings * UNIT * (2 * drawn - 1))


def deviation(function, inputs, draws=4, roundings=1.0):
    """Return a function's results in fp64, and how far rounding moves them, were every sum rounded but once.

    Args:
        function: mode and fp64 tensors -> fp64 tensors; computes under the mode, an `InDouble`.
        inputs: its tensors; taken to fp64.
        draws: how often everything is moved at random; the largest deviation of a result's numbers counts.
        roundings: how many roundoffs everything is moved by. `allowed(1, terms)` of them measure the whole bound, where
            functions with kinks (relu) are not linear in it: fp32 may fall on the other side of one, where the slope
            is another.

    Returns:
        The results, and for each the largest deviation of any of its numbers.
    """
    inputs = [x.detach().double() for x in inputs]
    exact = function(InDouble(), *inputs)
    generator = torch.Generator().manual_seed(11)
    found = [
        function(InDouble(generator, roundings), *(moved(x, generator, roundings) for x in inputs))
        for _ in range(draws)
    ]
    return exact, [max((other[i] - x).abs().max().item() for other in found) for i, x in enumerate(exact)]


def assert_moved_alike(one, two, start, share=0.01):
    """Compare two runs by how far they moved: they differ by at most this share of the norm of the way from the start.

    Adam divides a gradient by its size. So where one is nearly zero, rounding decides about a part of a step, and a
    bound for single numbers holds on some processors only. Other rows or rates differ by tens of percent.
    """
    moved = torch.as_tensor(one - start, dtype=torch.float64).norm()
    assert torch.as_tensor(one - two, dtype=torch.float64).norm() <= share * moved


def allowed(moves, terms):
    """Bound the error of an fp32 result that one rounding of everything it is made of moves by `moves`.

    A computed sum of n terms is the exact sum of terms that are each changed by a factor 1 + d, |d| <= n u, in whatever
    order they are added up: so however wide vectors are, whether products and sums are fused, and whichever compiler
    chose (Higham 2002, section 4.2). As roundings do not conspire, |d| <= lambda sqrt(n) u, but with a probability of
    2 n exp(-lambda^2 / 2) (Higham and Mary 2019, theorem 2.4): for a thousand terms one in 130. `deviation` measured
    what |d| <= u leads to, the condition times u, by Monte Carlo arithmetic (Parker 1997); it is linear in |d|.

    Args:
        moves: what `deviation` returned for the result.
        terms: of the longest sum, those of sums that go into it as terms added.
    """
    return CONFIDENCE * terms**0.5 * moves


def gradients_in_double(mixer, mask, scaling):
    """Return a function for `deviation`: mode, q, k, v, the output's gradient, the mixer's parameters -> the output by
    written-out weights, and the gradients to q, k, v and the parameters.
    """
    mixer = copy.deepcopy(mixer).double()

    def function(mode, q, k, v, towards, *parameters):
        for mine, value in zip(mixer.parameters(), parameters, strict=True):
            mine.data = value
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with mode, torch.enable_grad():
            weights = mixer.weights(q, k, scaling=scaling, key_padding_mask=mask)
            out = mixer.apply_output(weights @ v.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
        # Of an untied query map, a positive factor cancels, and what is behind it is idle.
        idle = not getattr(mixer.config, "tied", True)
        asked = [*leaves, *mixer.parameters()]
        found = torch.autograd.grad(out, asked, towards, allow_unused=idle, materialize_grads=idle)
        return [x.detach() for x in (out, *found)]

    return function
