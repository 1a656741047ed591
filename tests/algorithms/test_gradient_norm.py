"""Methods report the norm of their gradients where the loss asks for it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpax
from fedpax.algorithm import FederatedAlgorithm, WithGradientNorm
from fedpax.algorithms import data_parallel, diloco, fedavg

RNG = np.random.default_rng(0)
BATCHES = RNG.normal(size=(3, 4, 5, 2)).astype(np.float32)  # participants, steps, batch, features
W = RNG.normal(size=2).astype(np.float32)


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.mean((batch @ params["w"].astype(jnp.float32)) ** 2), {"size": jnp.float32(5)}


METHODS = {
    "fedavg": lambda loss: fedavg(loss, cohort_size=3, client_optimizer=optax.sgd(0.0)),
    "diloco": lambda loss: diloco(loss, islands=3, inner_optimizer=optax.sgd(0.0)),
    "data_parallel": lambda loss: data_parallel(loss, islands=3, optimizer=optax.sgd(0.0)),
}


def run(method: FederatedAlgorithm, batches: np.ndarray, dtype: Any = jnp.float32) -> Any:
    state = method.init({"w": jnp.asarray(W, dtype)})
    return jax.jit(method.round)(state, fedpax.Cohort(jnp.asarray(batches)))[1]


@pytest.mark.parametrize("name", METHODS)
def test_the_norm_is_averaged_over_steps_and_participants(name: str) -> None:
    metrics = run(METHODS[name](WithGradientNorm(loss_fn)), BATCHES)
    x = BATCHES.astype(np.float64)
    gradients = 2 * np.einsum("psb,psbf->psf", x @ W.astype(np.float64), x) / 5
    expected = np.linalg.norm(gradients, axis=-1).mean()
    assert metrics["gradient_norm"] == pytest.approx(expected, rel=1e-5)
    assert metrics["non_finite_step_fraction"] == 0
    plain = run(METHODS[name](loss_fn), BATCHES)
    assert metrics.keys() - plain.keys() == {"gradient_norm", "non_finite_step_fraction"}


def test_steps_that_are_not_finite_are_counted() -> None:
    bad = BATCHES.copy()
    bad[1, 2, 0] = np.nan
    metrics = run(METHODS["fedavg"](WithGradientNorm(loss_fn)), bad)
    # Step 2 of client 1 makes its model NaN, and with it step 3.
    assert metrics["non_finite_step_fraction"] == pytest.approx(2 / 12)
    assert np.isnan(metrics["gradient_norm"])


def test_norms_of_half_precision_gradients_are_summed_in_float32() -> None:
    metrics = run(METHODS["fedavg"](WithGradientNorm(loss_fn)), 20 * BATCHES, jnp.float16)
    assert np.isfinite(metrics["gradient_norm"]) and metrics["gradient_norm"] > 300


def test_a_loss_with_such_a_metric_of_its_own_is_refused() -> None:
    def own(params: Any, batch: Any) -> Any:
        return loss_fn(params, batch)[0], {"gradient_norm": jnp.float32(1)}

    with pytest.raises(ValueError, match=r"\['gradient_norm'\], which WithGradientNorm.*Rename"):
        run(METHODS["fedavg"](WithGradientNorm(own)), BATCHES)
