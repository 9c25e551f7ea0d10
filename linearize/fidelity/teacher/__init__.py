"""The frozen softmax inside a converted model: the inputs of its layers, and its weights row by row."""
