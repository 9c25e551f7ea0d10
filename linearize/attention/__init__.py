"""What takes softmax's place in a layer: the module, its cache, and the functions that transformers calls."""
