"""The ground that every package builds on: errors, events, options and their checks, the registry of kernels."""
