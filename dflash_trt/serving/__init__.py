"""The engine loop, request streams, text, and the LLM class."""
