"""Choose a kernel for every layer of a model under a budget of time and softmax layers."""

from linearize.kernel_search.config import SearchConfig

__all__ = ["SearchConfig"]
