"""Weight formats: what their tensors are, how they are quantized and read."""
