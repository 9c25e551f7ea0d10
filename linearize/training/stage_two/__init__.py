"""Stage two: tune a converted (or any) model on a task, and evaluate it."""
