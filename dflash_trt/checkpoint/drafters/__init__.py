"""Drafter checkpoint formats: one file each, found by its FORMAT."""
