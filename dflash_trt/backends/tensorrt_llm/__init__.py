"""The backend of TensorRT-LLM: what it can load, and the arguments that it is opened with. Imports nothing of it."""
