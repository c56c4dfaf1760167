"""Whether an engine fits a GPU, and how fast its step could be at best: arithmetic over its config, without tensors."""
