"""Training: the contract with algorithms, the one loop, checkpoints and metrics."""
