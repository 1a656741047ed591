"""The reductions as functions of placed values, and their reference in NumPy."""

import jax.numpy as jnp
import numpy as np

import fedpax

N = 5
REDUCTIONS = {
    "sum": (fedpax.federated_sum, jnp.sum),
    "mean": (fedpax.federated_mean, jnp.mean),
    "max": (fedpax.federated_max, jnp.max),
    "min": (fedpax.federated_min, jnp.min),
}
weighted_mean = fedpax.program(clients=N)(fedpax.federated_mean)


def weighted_reference(x, w):
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    return np.tensordot(w, x, 1) / w.sum()
