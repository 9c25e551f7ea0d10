"""Evaluation mode for a while leaves every module as it was."""

import pytest
from torch import nn

from linearize.modeling.model import evaluating


def test_each_module_is_in_its_own_mode_afterwards():
    """What somebody held in evaluation mode was set to training by a look at the model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    model.train()
    model[1].eval()
    before = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match="broken off"), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise ValueError("broken off")
    assert [module.training for module in model.modules()] == before == [True, True, False, True]
