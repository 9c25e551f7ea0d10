"""Converted models as transformers sees them: config, model classes, Auto registration, and the saved plan."""
