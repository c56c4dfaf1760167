"""Quantization of weights: the plan of formats, calibration, quantized tensors. Knows no networks."""
