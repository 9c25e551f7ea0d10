"""Export a converted model as graphs that run without Python: torch.export with a dynamic length, ONNX."""
