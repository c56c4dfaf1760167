"""TensorRT: lowering, plugins, builder, executor."""
