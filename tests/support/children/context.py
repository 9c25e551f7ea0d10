"""Run tiny converted models on parts of rows, in processes that together equal one that has the whole rows."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

import linearize
from linearize.attention.call import AttentionCall
from linearize.attention.factory import build_mixer
from linearize.attention.interface import linear_attentions
from linearize.attention.shape import HeadShape
from linearize.conversion.plan import set_trained_length
from linearize.core.errors import LinearizeError
from linearize.core.registry import Hybrid
from linearize.modeling.context_parallel import ContextParallel
from support.tiny import converted, stir

HYBRIDS = {
    "kernel": {},
    "window": {"window": 4},
    "odd": {"window": 5, "sinks": 3, "scale": "linear"},
    "none": {"kernel": "none", "window": 6, "sinks": 1},
}
TIMEOUT = datetime.timedelta(minutes=2)
"""If one process fails, the others end too."""
TOKENS = (60, 53)
"""The second is no multiple of the number of processes."""


def rows(model, tokens):
    """Two rows, of which the second ends before the last part begins, and their mask."""
    draw = torch.Generator().manual_seed(tokens)
    ids = torch.randint(5, 40, (2, tokens), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, tokens // 2 - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def weights_gradient(model, out, mask):
    model.zero_grad()
    (out.square() * mask[..., None]).sum().backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def compare(name: str, hybrid: str) -> None:
    """Hidden states of this part, and the gradients of all parts, equal those of one process."""
    model = stir(converted(name, **HYBRIDS[hybrid]))
    if name in ("gpt2", "llama") and HYBRIDS[hybrid].get("scale"):
        set_trained_length(model, 20)
    for tokens in TOKENS:
        inputs = rows(model, tokens)
        mask = inputs["attention_mask"]
        whole = model(**inputs, **({"use_cache": False} if name in ("gpt2", "llama") else {}))[0]
        wanted = weights_gradient(model, whole, mask)
        with linearize.context_parallel(model) as parallel:
            own = parallel.part(inputs)
            out = model(**own)[0]
            found = weights_gradient(model, out, own["attention_mask"])
        target, real = (x.tensor_split(parallel.size, dim=1)[parallel.rank] for x in (whole, mask.bool()))
        torch.testing.assert_close(out[real], target[real], rtol=1e-4, atol=1e-5)
        for key, grad in wanted.items():
            # A part without tokens gives some weights no gradient.
            mine = found.get(key, torch.zeros_like(grad))
            dist.all_reduce(mine)
            torch.testing.assert_close(mine, grad, rtol=1e-3, atol=1e-4 * max(1.0, float(grad.abs().max())))
        assert all(layer.across is None for layer in linear_attentions(model).values())


def main(jobs: Sequence[tuple[str, str]]) -> None:
    """Compare each job, a model and its hybrid."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    for job in jobs:
        compare(*job)
    dist.destroy_process_group()


def long(tokens: int) -> None:
    """One layer on a row of `tokens` tokens; prints the bytes that this process has sent, and the seconds."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    for causal in (True, False):
        mixer = build_mixer("hedgehog", {}, HeadShape(2, 1, 8, 8, causal), Hybrid(window=32, sinks=4, scale="linear"))
        mixer.reset_parameters(torch.Generator().manual_seed(0))
        draw = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(1, heads, tokens, 8, generator=draw) for heads in (2, 1, 1))
        parallel = ContextParallel()
        with torch.no_grad():
            whole = mixer(AttentionCall(q, k, v, 0.3))[0].tensor_split(parallel.size, dim=2)[parallel.rank]
            own = [x.tensor_split(parallel.size, dim=2)[parallel.rank] for x in (q, k, v)]
            start = time.perf_counter()
            out = parallel.attend(mixer, AttentionCall(*own, 0.3))[0]
        torch.testing.assert_close(out, whole, rtol=1e-4, atol=1e-5)
        print(parallel.sent, time.perf_counter() - start)
    dist.destroy_process_group()


def refused() -> None:
    """Print what each call that is not built is refused with."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    model = stir(converted("llama", "AutoModelForCausalLM", window=4))
    inputs = rows(model, 40)

    def plain(parallel):
        return parallel.part({"input_ids": inputs["input_ids"]})

    calls = {
        "cache": lambda parallel: model(**plain(parallel), use_cache=True),
        "weights": lambda parallel: model(**plain(parallel), output_attentions=True),
        "labels": lambda parallel: parallel.part({**inputs, "labels": inputs["input_ids"]}),
        "short": lambda parallel: parallel.part({"input_ids": inputs["input_ids"][:, :3]}),
        "part": lambda parallel: model(**parallel.part({"input_ids": inputs["input_ids"][:, :5]})),
        "left": lambda parallel: model(**parallel.part({**inputs, "attention_mask": inputs["attention_mask"].flip(1)})),
        "packed": lambda parallel: model(**{**plain(parallel), "position_ids": torch.arange(20).remainder(10)[None]}),
    }
    for name, call in calls.items():
        try:
            with linearize.context_parallel(model) as parallel:
                call(parallel)
            print(f"{name}: not refused")
        except LinearizeError as error:
            print(f"{name}: {error}")
    for options in (
        {"exact_keys": 2, "window": 4, "scale": "linear"},
        {"routed_blocks": 2, "window": 4},
        {"keep_softmax": [0]},
        {"kernel": "cosformer"},
        {"kernel": "macformer_exp"},
        {"kernel": "diag_softmax"},
    ):
        try:
            with linearize.context_parallel(converted("llama", **options)):
                print(f"{options}: not refused")
        except LinearizeError as error:
            print(f"{options}: {error}")
    mixing = stir(converted("llama", window=4))
    mixing.norm.register_forward_hook(lambda module, args, out: out + out.mean(dim=1, keepdim=True))
    try:
        with linearize.context_parallel(mixing):
            print("mixing: not refused")
    except LinearizeError as error:
        print(f"mixing: {error}")
    dist.destroy_process_group()
