"""SparseLoCo: against a NumPy loop, and what its default codec sends."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy_methods as reference
import optax
import pytest
from method_problem import assert_close, loss_fn, random_params, random_rounds

from fedpax import Cohort
from fedpax.aggregators import codecs
from fedpax.algorithms import sparseloco

ISLANDS = 3


def top_k(x, fraction):
    """Keep the largest magnitudes of a small array; the others are 0."""
    flat = np.asarray(x).ravel()
    k = int(np.ceil(fraction * flat.size))
    kept = np.zeros_like(flat)
    largest = np.argsort(-np.abs(flat))[:k]
    kept[largest] = flat[largest]
    return kept.reshape(np.shape(x))


def numpy_sparseloco(x, rounds, optimizer, fraction, eta, beta):
    states = [optimizer.init(x)] * ISLANDS
    residuals, history = [reference.each(np.zeros_like, x)] * ISLANDS, []
    for batches in rounds:
        sent, reports = [], []
        for i in range(ISLANDS):
            y, states[i], report = reference.train(
                x, optimizer, states[i], reference.participant(batches, i)
            )
            unsent = reference.each(lambda e, x, y: beta * e + x - y, residuals[i], x, y)
            sent.append(reference.each(lambda m: top_k(m, fraction), unsent))
            residuals[i] = reference.each(np.subtract, unsent, sent[-1])
            reports.append(report)
        x = reference.each(lambda x, q: x - eta * q, x, reference.mean(sent))
        history.append((x, list(residuals), reference.mean(reports)))
    return history


def test_equals_a_numpy_loop():
    rate, fraction, eta, beta = 0.3, 0.25, 0.8, 0.9
    algorithm = sparseloco(
        loss_fn,
        islands=ISLANDS,
        inner_optimizer=optax.sgd(rate, momentum=0.8),
        outer_learning_rate=eta,
        codec=codecs.top_k(fraction, block_size=4096),
        decay=beta,
    )
    rounds = random_rounds(3, ISLANDS)
    x = {name: np.float64(p) for name, p in random_params().items()}
    expected = numpy_sparseloco(x, rounds, reference.momentum(rate, 0.8), fraction, eta, beta)
    state, step = (
        algorithm.init(jax.tree.map(jnp.asarray, random_params())),
        jax.jit(algorithm.round),
    )
    for batches, (params, residuals, report) in zip(rounds, expected, strict=True):
        state, metrics = step(state, Cohort(batches))
        assert_close((state.params, metrics), (params, report))
        residual = state.aggregator_state.residual
        for i in range(ISLANDS):
            assert_close(jax.tree.map(lambda e, i=i: e[i], residual), residuals[i])


@pytest.mark.slow
def test_the_default_sends_64_of_4096_entries_in_four_values():
    def follow(w, batch):
        return jnp.sum(w * batch[0]), {}  # the outer gradient is the batch

    algorithm = sparseloco(follow, islands=1, inner_optimizer=optax.sgd(1.0))
    update = np.random.default_rng(0).normal(size=(1, 1, 1, 2 * 4096)).astype(np.float32)
    state, _ = jax.jit(algorithm.round)(algorithm.init(jnp.zeros(2 * 4096)), Cohort(update))
    moved = -np.asarray(state.params)
    assert np.count_nonzero(moved) == 2 * 64
    assert len(np.unique(moved[moved != 0])) <= 2 * 4
    np.testing.assert_allclose(
        moved + state.aggregator_state.residual[0], update[0, 0, 0], rtol=1e-5, atol=1e-6
    )


def test_an_invalid_decay_raises():
    with pytest.raises(ValueError, match="decay"):
        sparseloco(loss_fn, islands=2, inner_optimizer=optax.sgd(0.1), decay=0.0)
