"""Measure and compare models: time and memory (bench), and the page of pictures (report)."""
