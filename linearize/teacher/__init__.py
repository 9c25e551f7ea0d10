"""The frozen softmax inside a converted model: what its layers are shown, and its weights row by row."""
