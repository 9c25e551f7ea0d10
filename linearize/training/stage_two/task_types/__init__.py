"""One class per type of task: how its data becomes rows, and its predictions metrics."""
