"""Data parallelism: the division of examples over islands does not matter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from method_problem import PARTICIPANTS, TOLERANCE, loss_fn
from method_table import METHODS, problem, trainer

from fedpax import Cohort
from fedpax.algorithms import data_parallel

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("algorithms")


def test_metrics_are_means_over_the_steps_that_were_taken():
    rng = np.random.default_rng(7)
    batches = {"x": rng.normal(size=(1, 5, 2)).astype(np.float32)}
    algorithm = data_parallel(
        lambda params, batch: (jnp.sum(params["w"] * batch["x"]), {"first": batch["x"][0]}),
        islands=1,
        optimizer=optax.sgd(0.0),
    )
    state = algorithm.init({"w": jnp.array([2.0, -3.0])})
    _, metrics = jax.jit(algorithm.round)(state, Cohort(batches, num_steps=jnp.array([3])))
    taken = batches["x"][0, :3]
    np.testing.assert_allclose(metrics["first"], taken[:, 0].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], (taken @ [2.0, -3.0]).mean(), rtol=1e-5)


def test_islands_equal_one_large_batch():
    params, rounds, weights = problem(2)
    history = trainer("data parallelism", "4x2 automatic").run(params, rounds, weights)
    rate = METHODS["data parallelism"].rates.local
    optimizer = optax.adamw(rate, b1=0.9, b2=0.99, eps=1e-6, weight_decay=0.1)
    algorithm = data_parallel(loss_fn, islands=1, optimizer=optimizer)
    state, step = algorithm.init(jax.tree.map(jnp.asarray, params)), jax.jit(algorithm.round)

    def joined(leaf):
        """[islands, steps, batch, ...] -> [1, steps, islands * batch, ...]"""
        return np.concatenate(leaf, axis=1)[None]

    for batches, (wanted, metrics) in zip(rounds, history, strict=True):
        state, result = step(state, Cohort(jax.tree.map(joined, batches)))
        jax.tree.map(
            lambda g, w: np.testing.assert_allclose(g, w, **TOLERANCE), state.params, wanted.params
        )
        for name, of_all in (("loss", 1), ("confidence", 1), ("correct", PARTICIPANTS)):
            np.testing.assert_allclose(result[name], of_all * metrics[name], **TOLERANCE)
