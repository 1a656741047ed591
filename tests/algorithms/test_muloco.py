"""MuLoCo: which parameters Muon updates, and how far; its defaults."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy_methods as reference
import optax
import pytest
from method_problem import assert_close, loss_fn, random_params, random_rounds

from fedpax import Cohort
from fedpax.aggregators import codecs, compressed_mean
from fedpax.algorithms import diloco, muloco

ISLANDS, RATE = 2, 0.02


def first_round(algorithm, steps=1):
    state = algorithm.init(jax.tree.map(jnp.asarray, random_params()))
    batches = random_rounds(1, ISLANDS, steps)[0]
    return jax.jit(algorithm.round)(state, Cohort(batches))[0], batches


def both(moved, signs):
    """Scale signs to a movement: the first step of Adam with Nesterov momentum is c sign(g)."""
    factor = np.abs(moved).max() / np.abs(signs).max()
    assert 1 <= factor < 1.5
    return moved, factor * signs


def test_muon_steps_are_orthogonal_on_matrices_and_adams_elsewhere():
    """One island's step, read from an outer step of 1: U V^T of the gradient, sign of it."""
    only = {"islands": 1, "outer_optimizer": optax.sgd(1.0)}
    state = muloco(loss_fn, learning_rate=RATE, **only).init(
        jax.tree.map(jnp.asarray, random_params())
    )
    batches = random_rounds(1, 1, 1)[0]
    step = jax.jit(muloco(loss_fn, learning_rate=RATE, **only).round)
    state, _ = jax.device_get(step(state, Cohort(batches)))
    x = {name: np.float64(p) for name, p in random_params().items()}
    gradient, _ = reference.gradient_and_metrics(x, reference.participant(batches, 0)[0])
    for name in ("kernel", "out"):
        u, sizes, v = np.linalg.svd(gradient[name], full_matrices=False)
        rank = np.sum(sizes > 1e-6 * sizes[0])  # at most the number of examples
        moved = np.linalg.svd((x[name] - state.params[name]) / RATE, compute_uv=False)
        assert np.all((0.6 < moved[:rank]) & (moved[:rank] < 1.4))  # Newton-Schulz is not exact
        assert np.all(moved[rank:] < 1e-3) and sizes[0] > 2 * sizes[rank - 1]
        orthogonal = u[:, :rank] @ v[:rank]
        assert np.sum((x[name] - state.params[name]) / RATE * orthogonal) > 0.8 * rank
    for name in ("bias", "scale"):
        moved = x[name] - state.params[name]
        np.testing.assert_allclose(*both(moved, RATE * np.sign(gradient[name])), atol=1e-5)


@pytest.mark.slow
def test_defaults_are_diloco_with_the_authors_settings():
    state, _ = first_round(muloco(loss_fn, islands=ISLANDS), steps=3)
    wanted, _ = first_round(
        diloco(
            loss_fn,
            islands=ISLANDS,
            inner_optimizer=optax.contrib.muon(0.02),
            outer_optimizer=optax.sgd(0.7, momentum=0.6, nesterov=True),
        ),
        steps=3,
    )
    assert_close(state, wanted)


@pytest.mark.slow
def test_two_bits_with_error_feedback_train():
    aggregator = compressed_mean(codecs.sign(bits=2), error_feedback=True)
    algorithm = muloco(loss_fn, islands=ISLANDS, aggregator=aggregator)
    state, step = (
        algorithm.init(jax.tree.map(jnp.asarray, random_params())),
        jax.jit(algorithm.round),
    )
    cohort, losses = Cohort(random_rounds(1, ISLANDS)[0]), []
    for _ in range(30):
        state, metrics = step(state, cohort)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_parameters_can_be_kept_from_muon():
    """Without dimension numbers for a matrix, Adam updates it."""
    numbers = {
        "kernel": optax.contrib.MuonDimensionNumbers(),
        "out": None,
        "bias": None,
        "scale": None,
    }
    algorithm = muloco(
        loss_fn,
        islands=ISLANDS,
        learning_rate=RATE,
        weight_dimension_numbers=numbers,
        outer_optimizer=optax.sgd(1.0),
    )
    state, batches = first_round(algorithm)
    x = {name: np.float64(p) for name, p in random_params().items()}
    signs = [
        np.sign(reference.gradient_and_metrics(x, reference.participant(batches, i)[0])[0]["out"])
        for i in range(ISLANDS)
    ]
    moved = x["out"] - state.params["out"]
    np.testing.assert_allclose(*both(moved, RATE * np.mean(signs, axis=0)), atol=1e-5)
