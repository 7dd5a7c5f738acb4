"""Serving adapters in other programs. Nothing here imports such a program before the program itself is running."""
