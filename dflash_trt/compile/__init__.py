"""From proven checkpoints to an engine directory."""
