"""Sequence mixers: one file a kind, with the weights it needs and its forward pass."""
