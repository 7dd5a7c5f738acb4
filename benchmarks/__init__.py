"""Measurements of speed and memory; run from the repository root: `python -m benchmarks.adapter`."""
