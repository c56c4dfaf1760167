"""Weight formats: what their tensors are, how they are packed and read."""
