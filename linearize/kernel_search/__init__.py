"""The best kernel for every layer: candidates learn in one frozen pass, costs are measured, the whole model decides."""

from linearize.kernel_search.config import SearchConfig

__all__ = ["SearchConfig"]
