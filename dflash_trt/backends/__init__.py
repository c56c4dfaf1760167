"""Backends, vertical: everything that knows how one of them builds, opens and runs an engine."""
