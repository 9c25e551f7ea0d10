"""Several processes equal one with their batches as one, also when FSDP spreads the frozen model over them."""

import functools

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from support.children import apart, stage_one
from support.forks import together
from support.training import Fixed, batches, sharp

from linearize.core.errors import ConfigError
from linearize.training.sharding import make_accelerator
from linearize.training.stage_one import DistillConfig
from linearize.training.stage_one.loop import distill

KINDS = ("ddp", "fsdp")
MODELS = ("bert", "gpt2", "bert/macformer_exp")


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """What several processes trained, started once for all models and kinds."""

    @functools.cache
    def start(count):
        folder = tmp_path_factory.mktemp("several")
        jobs = [f"{model}:{kind}" for model in MODELS for kind in KINDS]
        together(stage_one.main, str(folder), jobs, count=count)
        return {job: load_file(folder / f"{job.replace('/', ' ')}.safetensors") for job in jobs}

    return start


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
def test_several_processes_equal_one_with_their_batches_as_one(model, count, several):
    one = stage_one.run(model, "one")
    assert one["losses"].shape == (6, 2)
    # A Macformer's statistics are still far from settled after six steps.
    assert "/" in model or one["losses"][-1].sum() < one["losses"][0].sum()
    for kind in KINDS:
        found = several(count)[f"{model}:{kind}"]
        assert found.keys() == one.keys()
        for name in one:
            torch.testing.assert_close(one[name], found[name], rtol=0, atol=1e-6)


def test_a_model_stays_on_its_device_if_an_earlier_one_was_elsewhere(monkeypatch):
    """Accelerate keeps the first device of a process; a second model was moved there, or refused."""
    model = sharp("bert")
    make_accelerator(model)
    monkeypatch.setitem(AcceleratorState._shared_state, "device", torch.device("meta"))
    assert make_accelerator(model).device.type == "cpu"


def test_states_that_one_machine_alone_has_are_refused(tmp_path):
    """The others began again at step 0: the saved kernels were trained on sums of unrelated gradients, then it hung."""
    said = together(apart.resume, str(tmp_path))
    assert said[0] == said[1]
    assert "resume: got states of the steps 0 and 4 in different processes (0: none), expected the same" in said[0]
    assert [(tmp_path / rank / "states").exists() for rank in "01"] == [True, False]


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
