"""Worked examples, one per family of models: short scripts to read, run and copy."""
