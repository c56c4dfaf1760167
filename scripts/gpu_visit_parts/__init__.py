"""The parts of scripts/gpu_visit.py."""
