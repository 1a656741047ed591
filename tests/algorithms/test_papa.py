"""PAPA: its forms, and what they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from method_problem import assert_close, loss_fn, random_params, random_rounds
from numpy_island_methods import papa as papa_reference
from numpy_methods import sgd

from fedpax import Cohort
from fedpax.algorithms import branch_train_merge, papa, papa_2, papa_all

ISLANDS = 5
SETTINGS = {"islands": ISLANDS, "optimizer": optax.sgd(0.2, momentum=0.8)}


def run(algorithm, rounds=2):
    state, step = (
        algorithm.init(jax.tree.map(jnp.asarray, random_params())),
        jax.jit(algorithm.round),
    )
    for batches in random_rounds(rounds, ISLANDS):
        state, metrics = step(state, Cohort(batches))
    return state, metrics


@pytest.mark.slow
def test_the_ends_of_alpha():
    """0 is PAPA-all, and with 1 nothing is communicated."""
    pushed, replaced = run(papa(loss_fn, alpha=0.0, **SETTINGS)), run(papa_all(loss_fn, **SETTINGS))
    assert_close(pushed, replaced)
    for leaf in jax.tree.leaves(replaced[0].local_params):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))
    apart, metrics = run(papa(loss_fn, alpha=1.0, **SETTINGS))
    experts, expected = run(branch_train_merge(loss_fn, **SETTINGS))
    assert_close(
        (apart.local_params, apart.params, metrics),
        (experts.expert_params, experts.params, expected),
    )


@pytest.mark.slow
def test_pairs_keep_the_average_and_halve_the_difference():
    algorithm = papa_2(loss_fn, **SETTINGS)
    apart, _ = run(branch_train_merge(loss_fn, **SETTINGS), rounds=1)
    paired, _ = run(algorithm, rounds=1)
    assert_close(paired.params, apart.params)
    for name, models in paired.local_params.items():
        own = np.asarray(apart.expert_params[name])
        candidates = [(own + np.roll(own, -c, axis=0)) / 2 for c in range(1, ISLANDS)]
        errors = [np.abs(models - candidate).max() for candidate in candidates]
        assert min(errors) < 1e-6 < sorted(errors)[1]


def test_one_model_is_its_own_average():
    algorithm = papa_2(
        lambda w, x: (jnp.sum((w - x) ** 2), {}), islands=1, optimizer=optax.sgd(0.5)
    )
    state, _ = algorithm.round(algorithm.init(jnp.zeros(3)), Cohort(jnp.ones((1, 1, 3))))
    np.testing.assert_array_equal(state.local_params, np.ones((1, 3)))


@pytest.mark.parametrize("alpha", [-0.1, 1.5, float("nan")])
def test_alpha_out_of_range_raises(alpha):
    with pytest.raises(ValueError, match=r"Pass 0\.99, or 0.0 for papa_all"):
        papa(loss_fn, alpha=alpha, **SETTINGS)


def test_a_round_is_differentiable_in_alpha():
    """Against central differences of the NumPy reference, in float64."""
    rounds = random_rounds(2, ISLANDS)
    start = {name: np.float64(p) for name, p in random_params().items()}
    direction = {name: np.random.default_rng(3).normal(size=p.shape) for name, p in start.items()}

    def along(params):
        return sum((params[name] * d).sum() for name, d in direction.items())

    def after(alpha):
        algorithm = papa(loss_fn, islands=ISLANDS, optimizer=optax.sgd(0.2), alpha=alpha)
        state = algorithm.init(jax.tree.map(jnp.asarray, start))
        for batches in rounds:
            state, _ = algorithm.round(state, Cohort(batches))
        return along(state.params)

    def expected(alpha):
        return along(papa_reference(start, rounds, sgd(0.2), lambda r: alpha)[-1][0])

    with jax.enable_x64(True):
        slope = jax.jit(jax.grad(after))(0.6)
    difference = (expected(0.6 + 1e-5) - expected(0.6 - 1e-5)) / 2e-5
    assert abs(difference) > 1e-4
    np.testing.assert_allclose(slope, difference, rtol=1e-6)
