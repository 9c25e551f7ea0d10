"""Kernels: one file each, found by listing this folder; `base` and files with a leading underscore hold shared code."""
