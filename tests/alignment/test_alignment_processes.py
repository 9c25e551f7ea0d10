"""Several processes: two align as one does with the doubled batch; FSDP is refused."""

import os
import sys
import textwrap

import pytest
import torch
from accelerate.utils import DistributedType
from processes import launch
from safetensors.torch import load_file
from test_align import QUICK, sharp
from test_loop import Fixed, batches

from linearize.alignment.config import AlignConfig
from linearize.alignment.loop import align
from linearize.distillation.loop import make_accelerator
from linearize.errors import ConfigError

CHILD = """
    import os, sys, torch
    sys.path[:0] = {paths!r}
    torch.set_num_threads(1)
    from safetensors.torch import save_file
    from test_align import QUICK, sharp
    from test_loop import batches
    from linearize.alignment.config import AlignConfig
    from linearize.alignment.loop import align

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

    model = sharp("bert", "AutoModelForSequenceClassification")
    result = align(model, Split(batches(model)), AlignConfig(**QUICK | {{"steps": 6, "eval_every": 2}}))
    if int(os.environ.get("RANK", "0")) == 0:
        state = {{k: v.clone().contiguous() for k, v in model.state_dict().items()}}
        losses = torch.tensor([report.loss for report in result.history])
        save_file(state | {{"losses": losses, "after": torch.tensor(result.after.loss)}}, sys.argv[1])
"""


def train(tmp_path, count):
    """Align in so many processes, and return what was trained."""
    here = os.path.dirname(__file__)
    root = os.path.dirname(here)
    script, target = tmp_path / "child.py", tmp_path / f"{count}.safetensors"
    script.write_text(textwrap.dedent(CHILD.format(paths=[here, root, os.path.join(root, "distillation")])))
    launch([sys.executable, script, target], count, tmp_path / f"{count} logs")
    return load_file(target)


@pytest.mark.timeout(900)
def test_two_processes_equal_one_with_the_doubled_batch(tmp_path):
    one, two = train(tmp_path, 1), train(tmp_path, 2)
    assert one.keys() == two.keys() and one["losses"].shape == (6,)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=2e-5)


def test_fsdp_is_refused():
    model = sharp("bert")
    accelerator = make_accelerator(model)
    before = accelerator.state.distributed_type
    try:
        accelerator.state.distributed_type = DistributedType.FSDP
        with pytest.raises(ConfigError, match="launch without FSDP"):
            align(model, Fixed(batches(model)), AlignConfig(**QUICK), accelerator=accelerator)
    finally:
        accelerator.state.distributed_type = before
