"""Several processes: two align as one does with the doubled batch; FSDP is refused."""

import pytest
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from support.children import alignment
from support.forks import together
from support.rounding import assert_moved_alike
from support.training import ALIGN as QUICK
from support.training import Fixed, batches
from support.training import loud_converted as sharp

from linearize.core.errors import ConfigError
from linearize.training.alignment.config import AlignConfig
from linearize.training.alignment.loop import align
from linearize.training.sharding import make_accelerator


def test_two_processes_equal_one_with_the_doubled_batch(tmp_path):
    together(alignment.main, str(tmp_path / "two"))
    one, two = alignment.run(), load_file(tmp_path / "two")
    assert one.keys() == two.keys() and one["losses"].shape == (6,)
    start = sharp("bert", "AutoModelForSequenceClassification").state_dict()
    for name in one:
        assert_moved_alike(one[name], two[name], start.get(name, 0.0))


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
