"""Scripts to run from the repository root: `python -m examples.trainers.grpo`."""
