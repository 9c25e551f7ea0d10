"""Measure the speed and memory of kernels and converted models next to softmax, in the same run."""
