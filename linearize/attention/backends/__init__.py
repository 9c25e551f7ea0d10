"""Backends: the ways to compute the call of a feature-map kernel."""
