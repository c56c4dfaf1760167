"""Loads on an engine that is not here: the real scheduler and loop over steps that cost what a plan says."""
