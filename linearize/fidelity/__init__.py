"""How close linear attention is to the softmax that it replaced: measures, and the walk over rows that they share."""

from linearize.fidelity.measure import Fidelity, LayerFidelity, OutputDifference, measure_layers
from linearize.fidelity.whole import measure

__all__ = ["Fidelity", "LayerFidelity", "OutputDifference", "measure", "measure_layers"]
