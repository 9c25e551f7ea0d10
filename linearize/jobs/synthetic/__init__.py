"""Data generated or reshaped here: ListOps, associative recall, bytes, pixels and Pathfinder as rows of text."""
