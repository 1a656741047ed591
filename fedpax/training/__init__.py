"""Training: the contract with algorithms, the training loop, checkpoints and metrics."""
