"""What tests share: tiny models and checkpoints, cases from the registry, children of two-process tests, references."""
