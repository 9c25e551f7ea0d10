"""Data made or reshaped here: ListOps, associative recall, bytes, pixels and Pathfinder as rows of text."""
