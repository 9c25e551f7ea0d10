"""Several processes align as one does, also if FSDP spreads the weights over them and if they are killed."""

import functools
import json

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from support.children import alignment
from support.children.tuning import FSDP
from support.forks import together
from support.rounding import assert_moved_alike
from support.training import ALIGN as QUICK
from support.training import Fixed, batches
from support.training import loud_converted as sharp

from linearize.core.errors import ConfigError
from linearize.training.alignment.config import AlignConfig
from linearize.training.alignment.loop import align
from linearize.training.sharding import make_accelerator

KINDS = {"ddp": {}, "fsdp": FSDP}


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """What several processes trained, started once for all cases of a kind."""

    @functools.cache
    def start(count, kind):
        folder = tmp_path_factory.mktemp(kind)
        together(alignment.main, str(folder), list(alignment.CASES), count=count, environment=KINDS[kind])
        return folder

    return start


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", alignment.CASES)
def test_several_processes_equal_one(case, kind, count, several):
    """One with their batches as one; in bf16, whose sums depend on their order, one that takes them in turn."""
    found = load_file(several(count, kind) / f"{case}.safetensors")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one = alignment.run(case, kind if case == "bf16" else "", count)
    finally:
        torch.set_num_threads(threads)
    assert one.keys() == found.keys() and one["losses"].shape == (8,)
    assert one["figures"][1] < one["figures"][0]
    name, head, _ = alignment.CASES[case]
    start = sharp(name, head).state_dict()
    for name in one:
        assert_moved_alike(one[name], found[name], start.get(name, 0.0))


def test_sharded_processes_that_are_killed_end_as_one_that_is_not(several, tmp_path):
    """In the first phase, before any state, and then in the second; to the bit."""
    options = {"save_every": 1, "folder": str(tmp_path / "states"), "resume": True}
    for stop in ("1", "5"):
        with pytest.raises(AssertionError, match="said"):
            together(alignment.main, str(tmp_path), ["bf16"], options, environment=FSDP | {"STOP_AFTER": stop})
        assert any((tmp_path / "states").glob("step-*")) == (stop == "5")
    together(alignment.main, str(tmp_path), ["bf16"], options, environment=FSDP)
    whole, resumed = (load_file(folder / "bf16.safetensors") for folder in (several(2, "fsdp"), tmp_path))
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    record = json.loads((tmp_path / "states" / "step-8" / "state.json").read_text())
    assert record["step"] == 8 and len(record["history"]) == 8


def test_the_first_version_of_fsdp_is_refused():
    model = sharp("bert")
    accelerator = make_accelerator(model)
    before = accelerator.state.distributed_type
    try:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
        with pytest.raises(ConfigError, match="alignment: got FSDP version 1, expected 2"):
            align(model, Fixed(batches(model)), AlignConfig(**QUICK), accelerator=accelerator)
    finally:
        accelerator.state.distributed_type = before
