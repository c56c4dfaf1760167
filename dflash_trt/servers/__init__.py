"""Servers of an engine."""
