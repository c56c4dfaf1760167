"""Tools that quantize checkpoints: one file each, found by its PRODUCER."""
