"""Low-precision weights: which linear gets which format, the scales, the packing. Knows nothing of networks."""
