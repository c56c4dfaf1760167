"""Reading of checkpoints: checked specs and canonical tensors."""
