"""Scheduling of requests, pages and K. Pure Python: no torch."""
