"""Backends: one package for all that builds, opens and runs an engine with it."""
