"""GPU kernels in the Triton language. They know tensors and step layouts, but no models or engines."""
