"""The OpenAI API through NVIDIA Dynamo: a worker for its front end, and a supervisor of both on one machine."""
