"""PyTorch on a GPU with our own kernels: CUDA graphs, staging, results."""
