"""Toy data and a toy base model, for the demo and the benchmarks: offline, on a CPU, in minutes."""
