"""One file per kind of task: how its data becomes rows, and its predictions figures."""
