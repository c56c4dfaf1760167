"""PyTorch on a CPU: the embedded default, and the reference that everything is compared with."""
