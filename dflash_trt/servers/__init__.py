"""What serves an engine to clients."""
