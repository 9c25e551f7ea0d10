"""Checkpoints: saved whole or not at all, self-describing, loadable by stock transformers."""
