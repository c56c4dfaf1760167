"""Engines of backend tensorrt_llm: TensorRT-LLM runs the requests, in a process or a server of its own."""
