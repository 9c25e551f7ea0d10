"""Whole jobs, from options to a saved result; the command line runs them and prints their events."""
