"""Kernels of this project for a CPU, in C++ behind a C interface: the torch backend with fewer and fused operators.

They are optional: `library.py` says why a machine runs without them, and then PyTorch computes everything.
"""
