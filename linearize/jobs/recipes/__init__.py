"""Recipes: load and validate them, run them, show their results."""
