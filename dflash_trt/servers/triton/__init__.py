"""The Triton Inference Server model, its repository and its tensor contracts."""
