"""GPU kernels in the Triton language. They know tensors and step layouts; models and engines are unknown here."""
