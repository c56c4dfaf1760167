"""The TensorRT-LLM backend: its limits, and the arguments to open it. Imports nothing of it."""
