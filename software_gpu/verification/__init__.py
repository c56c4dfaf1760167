"""The kernels of a user's engine, at its sizes, executed on a machine without a GPU."""
