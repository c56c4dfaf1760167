"""Our CPU kernels in C++ with a C interface: the torch backend with fewer and fused operators.

They are optional: `library.py` says why a machine runs without them; PyTorch then computes everything.
"""
