"""The network, written once over the op façade, and the backends that run or compile it."""
