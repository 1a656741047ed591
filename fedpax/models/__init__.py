"""Models: a transformer and small classifiers in flax.nnx, as pure functions, and their losses."""
