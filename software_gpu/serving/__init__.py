"""Serving runs of whole engines at full size on the software GPU, whose kernels are counted and compute nothing."""
