"""Several processes: two equal one with the doubled batch, also when FSDP spreads the frozen model over them."""

import os
import sys
import textwrap

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from processes import launch
from safetensors.torch import load_file
from test_loop import Fixed, batches, sharp

from linearize.distillation import DistillConfig
from linearize.distillation.loop import distill, make_accelerator
from linearize.distillation.shard import blocks_of
from linearize.errors import ConfigError

CHILD = """
    import os, sys, torch
    sys.path[:0] = {paths!r}
    torch.set_num_threads(1)
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from safetensors.torch import save_file
    from torch.distributed.tensor import DTensor
    from test_loop import batches, sharp
    import linearize.distillation.loop as loop
    from linearize.distillation import DistillConfig

    class Split:
        def __init__(self, made):
            self.made = made
        def train_batches(self, start=0, rank=0, world_size=1):
            while True:
                for batch in self.made:
                    size = len(next(iter(batch.values()))) // world_size
                    yield {{k: v[rank * size : (rank + 1) * size] for k, v in batch.items()}}
        def holdout_batches(self):
            return self.made[:1]

    model = sharp(sys.argv[3], "AutoModelForCausalLM" if sys.argv[3] == "gpt2" else "AutoModel")
    accelerator, spread = loop.make_accelerator(model), []
    if sys.argv[2] == "fsdp":
        # accelerate's own configuration turns FSDP on for accelerators only; torch shards on a CPU as well.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        make = loop.frozen_model
        loop.frozen_model = lambda *args: spread.append(make(*args)) or spread[0]
    config = DistillConfig(steps=6, eval_every=2)
    result = loop.distill(model, Split(batches(model)), config, accelerator=accelerator)
    if sys.argv[2] == "fsdp":
        base = model.base_model
        local = [p for p in spread[0].base_model.parameters() if isinstance(p, DTensor)]
        kernels = [p for n, p in base.named_parameters() if ".linear_attention." in n]
        assert len(local) == len(list(base.parameters())) - len(kernels)
        assert sum(p.to_local().numel() for p in local) < 0.6 * sum(p.numel() for p in local)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    if int(os.environ.get("RANK", "0")) == 0:
        state = {{k: v.clone().contiguous() for k, v in model.state_dict().items()}}
        losses = torch.tensor([[*report.losses.values()] for report in result.history])
        save_file(state | {{"losses": losses, "after": torch.tensor(result.after.mean("kl"))}}, sys.argv[1])
"""


def train(tmp_path, kind, model):
    """Train in one process, or in two, and return what was trained."""
    paths = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]
    script, target = tmp_path / "child.py", tmp_path / f"{kind}.safetensors"
    script.write_text(textwrap.dedent(CHILD.format(paths=paths)))
    launch([sys.executable, script, target, kind, model], 1 if kind == "one" else 2, tmp_path / f"{kind} logs")
    return load_file(target)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_two_processes_equal_one_with_the_doubled_batch(model, tmp_path):
    one = train(tmp_path, "one", model)
    assert one["losses"].shape == (6, 2) and one["losses"][-1].sum() < one["losses"][0].sum()
    for kind in ("ddp", "fsdp"):
        two = train(tmp_path, kind, model)
        assert two.keys() == one.keys()
        for name in one:
            torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-6)


def test_the_first_version_of_fsdp_is_refused():
    model = sharp("bert")
    accelerator = make_accelerator(model)
    before = accelerator.state.distributed_type
    try:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
        with pytest.raises(ConfigError, match="set fsdp_version: 2"):
            distill(model, Fixed(batches(model)), DistillConfig(steps=1), accelerator=accelerator)
    finally:
        accelerator.state.distributed_type = before


def test_blocks_are_the_layers():
    assert [type(block).__name__ for block in blocks_of(sharp("bert"))] == ["BertLayer"] * 2
    assert [type(block).__name__ for block in blocks_of(sharp("gpt2"))] == ["GPT2Block"] * 2
