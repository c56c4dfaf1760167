"""The OpenAI API through NVIDIA Dynamo: a worker, and a supervisor of worker and front end."""
