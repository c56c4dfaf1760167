"""Does an engine fit a GPU, and how fast can a step be? Arithmetic over its config, without tensors."""
