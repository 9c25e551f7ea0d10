"""Metrics and pictures of how close linear attention is to the softmax that it replaced."""

from linearize.fidelity.measure import Fidelity, LayerFidelity, OutputDifference, measure, measure_layers

__all__ = ["Fidelity", "LayerFidelity", "OutputDifference", "measure", "measure_layers"]
