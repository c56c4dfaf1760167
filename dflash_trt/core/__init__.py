"""Shared vocabulary: errors, specs, configs, requests, batches.

No module imports torch at its top level.
"""
