"""Eager DiLoCo: DiLoCo for one island, and islands that stay together."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from method_problem import assert_close, loss_fn, random_params, random_rounds

from fedpax import Cohort
from fedpax.algorithms import diloco, eager_diloco

pytestmark = pytest.mark.slow

SETTINGS = {
    "inner_optimizer": optax.adamw(0.02, weight_decay=0.1),
    "outer_optimizer": optax.sgd(0.6, momentum=0.8, nesterov=True),
}


def run(algorithm, rounds):
    state, step = (
        algorithm.init(jax.tree.map(jnp.asarray, random_params())),
        jax.jit(algorithm.round),
    )
    for batches in rounds:
        state, metrics = step(state, Cohort(batches))
    return state, metrics


def test_one_island_is_diloco():
    rounds = random_rounds(3, participants=1)
    state, metrics = run(eager_diloco(loss_fn, islands=1, **SETTINGS), rounds)
    wanted, expected = run(diloco(loss_fn, islands=1, **SETTINGS), rounds)
    assert_close((state.params, metrics), (wanted.params, expected))


def test_islands_differ_by_their_last_outer_gradients_alone():
    """With outer SGD, x_i - x_j = (y_i's last gradient - y_j's) * -eta / M, after any rounds."""
    eta, islands = 0.6, 4
    algorithm = eager_diloco(
        loss_fn,
        islands=islands,
        inner_optimizer=optax.sgd(0.2),
        outer_optimizer=optax.sgd(eta),
    )
    state, _ = run(algorithm, random_rounds(5, islands))
    for name, models in state.local_params.items():
        last = np.asarray(state.outer_gradient[name])
        apart = np.asarray(models) - np.asarray(models)[:1]
        wanted = -eta * (last - last[:1]) / islands
        assert np.abs(wanted).max() > 1e-3
        np.testing.assert_allclose(apart, wanted, atol=2e-6)
