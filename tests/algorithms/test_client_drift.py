"""Clients that disagree on quadratics: who finds the optimum of their mean, and who drifts.

Client i has f_i(w) = (w - b_i)' A_i (w - b_i) / 2, and takes K exact gradient steps a round.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpax import Cohort
from fedpax.algorithms import fedavg, feddyn, fedprox, mime, mime_lite, scaffold

CLIENTS, STEPS, RATE, SIZE = 5, 10, 0.1, 4


def quadratics() -> tuple[np.ndarray, np.ndarray]:
    """Draw Hessians with eigenvalues from 0.5 to 3, and the clients' optima."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(CLIENTS, SIZE, SIZE)))[0]
    values = rng.uniform(0.5, 3, size=(CLIENTS, 1, SIZE))
    return basis * values @ basis.transpose(0, 2, 1), rng.normal(size=(CLIENTS, SIZE)) * 3


HESSIANS, CENTERS = quadratics()
OPTIMUM = np.linalg.solve(HESSIANS.sum(0), np.einsum("ijk,ik->j", HESSIANS, CENTERS))


def loss_fn(w: Any, batch: Any) -> tuple[jax.Array, None]:
    hessian, center = batch["hessian"][0], batch["center"][0]
    return (w - center) @ hessian @ (w - center) / 2, None


def errors(build: Any, rounds: int, **settings: Any) -> tuple[Any, np.ndarray]:
    """Return the last model, and its distance from the optimum after each round; in float64."""
    repeated = [np.repeat(leaf[:, None, None], STEPS, 1) for leaf in (HESSIANS, CENTERS)]
    batches = dict(zip(("hessian", "center"), repeated, strict=True))
    cohort = Cohort(batches, client_ids=np.arange(CLIENTS))
    with jax.enable_x64(True):
        algorithm = build(
            loss_fn, cohort_size=CLIENTS, client_optimizer=optax.sgd(RATE), **settings
        )

        def step(state, _):
            state, _ = algorithm.round(state, cohort)
            return state, jnp.linalg.norm(state.params - OPTIMUM)

        start = algorithm.init(jnp.zeros(SIZE))
        state, distances = jax.jit(lambda state: jax.lax.scan(step, state, length=rounds))(start)
        return jax.device_get((state.params, distances))


def fixed_point(mu: float) -> np.ndarray:
    """Return the point that K steps, with FedProx's term, map to itself in the clients' mean.

    From x, client i ends at x - M_i (x - b_i), with M_i the sum over k < K of
    (I - eta (A_i + mu I))^k eta A_i.
    """
    moves = np.zeros_like(HESSIANS)
    for _ in range(STEPS):
        moves += RATE * (HESSIANS - (HESSIANS + mu * np.eye(SIZE)) @ moves)
    return np.linalg.solve(moves.sum(0), np.einsum("ijk,ik->j", moves, CENTERS))


@pytest.mark.parametrize(
    ("build", "settings", "mu"), [(fedavg, {}, 0.0), (fedprox, {"mu": 0.5}, 0.5)]
)
def test_fedavg_and_fedprox_drift_to_a_point_that_is_not_the_optimum(build, settings, mu):
    params, distances = errors(build, 100, **settings)
    np.testing.assert_allclose(params, fixed_point(mu), rtol=1e-9)
    assert distances[-1] > 0.1


def test_a_proximal_term_reduces_the_drift():
    distances = [np.linalg.norm(fixed_point(mu) - OPTIMUM) for mu in (0.0, 0.5, 5.0)]
    assert distances[0] > distances[1] > distances[2] > 0.1


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (scaffold, {"num_clients": CLIENTS, "option": "I"}),
        (scaffold, {"num_clients": CLIENTS, "option": "II"}),
        (feddyn, {"num_clients": CLIENTS, "alpha": 1.0}),
        (mime, {}),
    ],
    ids=["SCAFFOLD I", "SCAFFOLD II", "FedDyn", "Mime"],
)
def test_corrected_methods_converge_linearly_to_the_optimum(build, settings):
    """The error falls at least tenfold every ten rounds, down to rounding."""
    _, distances = errors(build, 100, **settings)
    assert distances[0] > 0.1
    assert (distances[10:] < np.maximum(0.1 * distances[:-10], 1e-13)).all()
    assert distances[-1] < 1e-13


def test_mime_lite_drifts():
    assert errors(mime_lite, 100)[1][-1] > 0.1
