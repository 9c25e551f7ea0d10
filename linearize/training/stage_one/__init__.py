"""Stage one: kernels learn to imitate the frozen softmax attention, layer by layer, in one pass of the model."""

from linearize.training.stage_one.config import DistillConfig

__all__ = ["DistillConfig"]
