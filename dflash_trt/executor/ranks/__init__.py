"""Several ranks: one process each, driven by rank 0."""
