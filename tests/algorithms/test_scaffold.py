"""SCAFFOLD's two ways to compute a client's control in option II, and when each is used."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpax import Cohort, make_mesh
from fedpax.algorithms import scaffold
from fedpax.algorithms.parts.local_steps import constant_learning_rate

RATE = 0.05


def loss_fn(w: Any, batch: Any) -> tuple[jax.Array, None]:
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2) / 2, None


@functools.cache
def run(by_formula: bool, rounds: int = 4) -> Any:
    """Train on ragged clients, by the paper's formula or with the mean of the gradients."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 4, 8, 5)).astype(np.float32)
    batches = {"x": x, "y": rng.normal(size=(3, 4, 8)).astype(np.float32)}
    cohort = Cohort(batches, None, np.array([4, 0, 2]), np.array([1, 3, 0]))
    rate = RATE if by_formula else optax.constant_schedule(RATE)
    algorithm = scaffold(loss_fn, cohort_size=3, num_clients=4, client_optimizer=optax.sgd(rate))
    state, step = algorithm.init(jnp.ones(5)), jax.jit(algorithm.round)
    for _ in range(rounds):
        state, _ = step(state, cohort)
    return state


def test_the_formula_and_the_mean_of_the_gradients_give_the_same_controls() -> None:
    formula, mean = run(True), run(False)
    np.testing.assert_allclose(formula.params, mean.params, atol=1e-6)
    controls = mean.client_controls.to_host()
    np.testing.assert_allclose(formula.client_controls.to_host(), controls, atol=1e-5)
    assert np.abs(controls[[0, 1]]).min() > 1e-3
    assert not controls[[2, 3]].any()  # an absent client, and one without a step


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.sgd(0.5), 0.5),
        (optax.chain(optax.identity(), optax.scale(-0.25)), 0.25),
        (optax.sgd(0.5, momentum=0.9), None),
        (optax.sgd(optax.constant_schedule(0.5)), None),
        (optax.sgd(optax.cosine_decay_schedule(0.5, 10)), None),
        (optax.chain(optax.clip(1.0), optax.sgd(0.5)), None),
        (optax.chain(optax.sgd(0.5), optax.clip(1.0)), None),
        (optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5)), None),
        (optax.sign_sgd(0.5), None),
        (optax.set_to_zero(), None),
        (optax.identity(), None),
        (optax.adam(0.5), None),
        (
            optax.multi_transform(
                {"slow": optax.sgd(0.25), "fast": optax.sgd(0.5)}, {"a": "slow", "b": "fast"}
            ),
            None,
        ),
    ],
)
def test_only_plain_sgd_has_a_constant_learning_rate(
    optimizer: optax.GradientTransformation, expected: float | None
) -> None:
    params = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}
    assert constant_learning_rate(optimizer, params) == expected


def test_narrow_parameters_have_no_constant_learning_rate() -> None:
    params = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2), jnp.bfloat16)}
    assert constant_learning_rate(optax.sgd(0.5), params) is None


@pytest.mark.parametrize("ragged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_loop_over_clients_never_copies_the_controls_of_all_clients(ragged: bool) -> None:
    """Each client's control is written in place, and the old one has one reader."""
    clients, features = 16, 2**14
    batches = {"x": np.zeros((clients, 2, 4, features), np.float32)}
    batches["y"] = np.zeros((clients, 2, 4), np.float32)
    steps = np.full(clients, 2) if ragged else None
    cohort = Cohort(batches, None, steps, np.arange(clients))
    settings = {"cohort_size": clients, "num_clients": clients, "chunk_size": 1}
    algorithm = scaffold(loss_fn, client_optimizer=optax.sgd(RATE), **settings)
    with jax.set_mesh(make_mesh(devices=jax.devices()[:2], clients=2)):
        state = algorithm.init(jnp.ones(features))
        compiled = jax.jit(algorithm.round, donate_argnums=0).lower(state, cohort).compile()
    assert not re.search(rf"f32\[{clients // 2},{features}\]\S* copy\(", compiled.as_text())
    # Of a client: batches and eight arrays. With another reader, the old control is the ninth.
    states = compiled.memory_analysis().temp_size_in_bytes / 4 / features
    assert states < batches["x"][0].size / features + 9.5
