"""Simulated loads: the real scheduler and loop over steps that cost what a plan says."""
