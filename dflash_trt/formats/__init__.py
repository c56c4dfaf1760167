"""Weight formats: their tensors, quantization and dequantization."""
