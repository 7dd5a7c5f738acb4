"""What studies share: a ledger of runs, learning rates until the best is enclosed, paired differences, exact match."""
