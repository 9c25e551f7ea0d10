"""The replacement for softmax in a layer: the module, its cache, and the functions that transformers calls."""
