"""Several processes: two find the plan that one finds with the doubled batch; FSDP is refused."""

import json

import pytest
from accelerate.utils import DistributedType
from support.children import search as child
from support.forks import together
from support.training import Fixed, batches, loud

from linearize.core.errors import ConfigError
from linearize.jobs.config import SearchJob
from linearize.jobs.search import search_checkpoint
from linearize.kernel_search import SearchConfig
from linearize.kernel_search.loop import search
from linearize.training.sharding import make_accelerator

REFUSED = "search: got FSDP, expected one process or plain data parallelism"


@pytest.mark.slow
def test_two_processes_find_the_plan_of_one(tmp_path):
    together(child.main, str(tmp_path / "two"))
    first, second = (json.loads((tmp_path / f"two.{rank}").read_text()) for rank in (0, 1))
    assert first == second
    one = child.run()
    assert first["losses"] == pytest.approx(one["losses"], abs=1e-5) and len(one["losses"]) == 12
    assert [x["label"] for x in first["layers"]] == [x["label"] for x in one["layers"]]
    for mine, other in zip(first["layers"], one["layers"], strict=True):
        for label, tried in other["tried"].items():
            assert mine["tried"][label]["error"] == pytest.approx(tried["error"], abs=1e-5)
    assert len(first["points"]) == len(one["points"])
    for mine, other in zip(first["points"], one["points"], strict=True):
        assert (mine["name"], mine["kernels"], mine["share"]) == (other["name"], other["kernels"], other["share"])
        assert mine["error"] == pytest.approx(other["error"], abs=1e-5)


def test_fsdp_is_refused():
    model = loud("bert")
    accelerator = make_accelerator(model)
    before = accelerator.state.distributed_type
    try:
        accelerator.state.distributed_type = DistributedType.FSDP
        with pytest.raises(ConfigError, match=REFUSED):
            search(model, Fixed(batches(model)), SearchConfig(), accelerator=accelerator)
    finally:
        accelerator.state.distributed_type = before


def test_fsdp_is_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=REFUSED) as caught:
        search_checkpoint(SearchJob.of(model="nowhere"))
    assert "\n" not in str(caught.value)
