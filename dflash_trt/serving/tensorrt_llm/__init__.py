"""Engines of backend tensorrt_llm: TensorRT-LLM runs the requests, in its own process or server."""
