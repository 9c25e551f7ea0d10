"""Recipes: YAML files, one per published table or demonstration (data only)."""
