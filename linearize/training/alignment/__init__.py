"""Alignment of a whole converted model with its original: hidden states, pooled output and logits."""
