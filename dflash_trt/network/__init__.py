"""The network, written once over the op façade, and the back ends that run or compile it."""
