"""The parts of scripts/gpu_bench.py."""
