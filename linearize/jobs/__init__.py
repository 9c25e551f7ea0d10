"""Whole jobs, from options to a saved result: what the command line runs, and prints the events of."""
