"""Foreign checkpoints in, proven specs and canonical tensors out."""
