"""One class per type of task: how its data becomes rows, and how its predictions become metrics."""
