"""How close linear attention is to the softmax that it replaced: measures, and the walk over rows that they share."""

from linearize.fidelity.measure import Fidelity, LayerFidelity, measure

__all__ = ["Fidelity", "LayerFidelity", "measure"]
