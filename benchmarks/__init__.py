"""Measurements of speed, memory and quality; run from the repository root: `python -m benchmarks.adapter`."""
