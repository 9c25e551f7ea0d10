"""Speed and memory of converted models, measured beside softmax in the same run."""
