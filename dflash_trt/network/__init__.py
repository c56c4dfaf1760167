"""The network, written once over the op façade that each backend implements."""
