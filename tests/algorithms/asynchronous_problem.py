"""The problem of the asynchronous methods' tests: parameters, cohorts, a run in one scan."""

import jax
import jax.numpy as jnp
import numpy as np
from method_problem import random_params, random_rounds

from fedpax import Cohort


def jax_params(seed=0):
    return jax.tree.map(jnp.asarray, random_params(seed))


def float64_params(seed=0):
    return {name: np.float64(leaf) for name, leaf in random_params(seed).items()}


def cohorts(batches, schedules, num_steps=None):
    """Make the cohorts of all rounds; `schedules` and `num_steps` have leaves `[rounds, ...]`."""
    return [
        Cohort(
            own,
            num_steps=None if num_steps is None else num_steps[r],
            schedule=jax.tree.map(lambda leaf, r=r: leaf[r], schedules),
        )
        for r, own in enumerate(batches)
    ]


def stack(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def run_in_scan(algorithm, state, rounds):
    """Run all rounds as one program; return the last state, and parameters and metrics of each."""

    def step(state, cohort):
        state, metrics = algorithm.round(state, cohort)
        return state, (state.params, metrics)

    return jax.device_get(jax.jit(lambda s, c: jax.lax.scan(step, s, c))(state, stack(rounds)))


__all__ = [
    "cohorts",
    "float64_params",
    "jax_params",
    "random_rounds",
    "run_in_scan",
    "stack",
]
