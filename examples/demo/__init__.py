"""What `make demo` runs: a small pretrained chat model, tasks whose answers can be checked, and the comparison."""
