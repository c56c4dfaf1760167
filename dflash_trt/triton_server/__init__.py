"""Engines behind Triton Inference Server: the model it loads, and the repository it loads it from."""
