"""Data generated or reshaped here: ListOps, associative recall, bytes and pixels as rows of text."""
