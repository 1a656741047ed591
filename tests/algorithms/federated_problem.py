"""A random problem of clients with different numbers of steps, for laws of methods."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedpax import Cohort
from fedpax.algorithms import (
    fedavg,
)

CLIENTS, POPULATION, STEPS = 4, 6, 3
SGD = optax.sgd(0.05)
IDS = np.array([5, 0, 3, 2])


def loss_fn(w: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute half the mean square of a linear model's error."""
    error = batch["x"] @ w - batch["y"]
    return jnp.mean(error**2) / 2, {"bias": jnp.mean(error)}


def random_cohort(seed: int = 0, *, ragged: bool = False, steps: int = STEPS) -> Cohort:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(CLIENTS, steps, 8, 5)).astype(np.float32)
    y = np.einsum("csbf,cf->csb", x, rng.normal(size=(CLIENTS, 5))).astype(np.float32)
    num_steps = np.array([1, 3, 2, 3]) if ragged else None
    return Cohort({"x": x, "y": y}, np.array([8, 24, 15, 23]), num_steps, IDS)


START = jnp.asarray(np.random.default_rng(9).normal(size=5), jnp.float32)


def run(algorithm: Any, cohort: Cohort, rounds: int = 3) -> tuple[Any, Any]:
    state, step = algorithm.init(START), jax.jit(algorithm.round)
    for _ in range(rounds):
        state, metrics = step(state, cohort)
    assert np.abs(state.params - START).max() > 0.02
    return state, metrics


COMMON = {"cohort_size": CLIENTS, "client_optimizer": SGD}
STORED = COMMON | {"num_clients": POPULATION}
# An algorithm that is built once is compiled once.
plain_fedavg = functools.cache(fedavg)


def examples_of(cohort: Cohort, i: int) -> Any:
    """Return the examples of all a client's batches, as one batch."""
    return jax.tree.map(lambda b: b[i].reshape(-1, *b.shape[3:]), cohort.batches)
