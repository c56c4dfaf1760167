"""A GPU made of software: compiled kernels run on a CPU, under the rules of CUDA."""
