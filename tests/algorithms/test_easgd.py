"""EASGD: the elastic forces balance, and compressed differences reach the center."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from method_problem import assert_close, loss_fn, random_params, random_rounds

from fedpax import Cohort
from fedpax.aggregators import quantized_mean
from fedpax.algorithms import easgd

ISLANDS = 4


def quadratic(w, batch):
    return 0.5 * jnp.sum((w - jnp.mean(batch, axis=0)) ** 2), {}


def test_islands_and_center_settle_between_the_islands_optima():
    """At rest on quadratics with optima t_i, the center is the mean of the t_i, islands near it."""
    targets = np.random.default_rng(0).normal(size=(ISLANDS, 1, 1, 3)).astype(np.float32)
    rate, beta = 0.3, 0.8
    algorithm = easgd(quadratic, islands=ISLANDS, optimizer=optax.sgd(rate), beta=beta)
    state, step = algorithm.init(jnp.zeros(3)), jax.jit(algorithm.round)
    for _ in range(200):
        state, _ = step(state, Cohort(targets))
    center = targets.mean(axis=(0, 1, 2))
    np.testing.assert_allclose(state.params, center, atol=1e-5)
    # x = y - a (y - c) with y = x - r (x - t), solved for x.
    a = beta / ISLANDS
    wanted = ((1 - a) * rate * targets[:, 0, 0] + a * center) / (1 - (1 - a) * (1 - rate))
    np.testing.assert_allclose(state.local_params, wanted, atol=1e-5)


@pytest.mark.slow
def test_what_the_center_gains_the_islands_lose():
    """Without steps (a learning rate of 0) the sum of islands and center stays."""
    algorithm = easgd(loss_fn, islands=ISLANDS, optimizer=optax.sgd(0.0), beta=0.6)
    state = algorithm.init(jax.tree.map(jnp.asarray, random_params()))
    scattered = jax.tree.map(
        lambda y: y + np.random.default_rng(1).normal(size=y.shape), state.local_params
    )
    before = state._replace(local_params=jax.tree.map(jnp.float32, scattered))
    after, _ = jax.jit(algorithm.round)(before, Cohort(random_rounds(1, ISLANDS)[0]))

    def total(state):
        return jax.tree.map(lambda c, y: c + y.sum(0), state.params, state.local_params)

    assert_close(total(after), total(before))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after.params, before.params)
    assert min(jax.tree.leaves(moved)) > 1e-2


@pytest.mark.slow
def test_differences_can_be_quantized():
    targets = np.random.default_rng(0).normal(size=(ISLANDS, 1, 1, 3)).astype(np.float32)
    algorithm = easgd(
        quadratic, islands=ISLANDS, optimizer=optax.sgd(0.3), aggregator=quantized_mean(4)
    )
    state, step = algorithm.init(jnp.zeros(3)), jax.jit(algorithm.round)
    centers = []
    for _ in range(400):
        state, _ = step(state, Cohort(targets))
        centers.append(state.params)
    mean = np.mean(centers[200:], axis=0)
    np.testing.assert_allclose(mean, targets.mean(axis=(0, 1, 2)), atol=0.02)


@pytest.mark.parametrize("beta", [0.0, 1.1, float("nan")])
def test_beta_out_of_range_raises(beta):
    with pytest.raises(ValueError, match=r"Pass 0\.9, as the paper"):
        easgd(loss_fn, islands=2, optimizer=optax.sgd(0.1), beta=beta)
