"""Quantization of weights: the plan of formats, calibration, the quantized tensors. Knows nothing of networks."""
