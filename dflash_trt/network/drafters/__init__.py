"""Drafting algorithms."""
