"""Optimizers of optax that need the loss beside its gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpax.algorithms as algorithms
from fedpax import Cohort
from fedpax.aggregators import mean
from fedpax.algorithms.parts.frozen_leaves import frozen_leaves

OPTIMIZERS = {
    "polyak": optax.polyak_sgd(max_learning_rate=0.1),
    "plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5, patience=0)),
    "lbfgs": optax.lbfgs(),
    "momo": optax.contrib.momo(0.1),
}
BATCHES = np.random.default_rng(0).normal(size=(2, 4, 5, 3)).astype(np.float32)
NUM_STEPS = np.array([4, 2])
START = {"a": jnp.array([0.5, -1.0, 2.0]), "b": jnp.float32(0.3)}


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, None]:
    return jnp.mean((batch @ params["a"] - jnp.sin(params["b"]) - 1) ** 2), None


def train(optimizer: Any, batches: Any) -> Any:
    """Train by a loop of optax, without fedpax."""
    params, state = START, optimizer.init(START)
    for batch in batches:

        def value_fn(params: Any, batch: Any = batch) -> jax.Array:
            return loss_fn(params, batch)[0]

        value, grad = jax.value_and_grad(value_fn)(params)
        extra = {"value": value, "grad": grad, "value_fn": value_fn}
        updates, state = optimizer.update(grad, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize(
    ("name", "chunk_size"), [("polyak", None), *((name, 1) for name in OPTIMIZERS)]
)
def test_local_steps_pass_the_loss(name: str, chunk_size: int | None) -> None:
    optimizer = OPTIMIZERS[name]
    algorithm = algorithms.fedavg(
        loss_fn, cohort_size=2, client_optimizer=optimizer, chunk_size=chunk_size
    )
    state, _ = jax.jit(algorithm.round)(algorithm.init(START), Cohort(BATCHES, num_steps=NUM_STEPS))
    ends = [train(optimizer, batches[:n]) for batches, n in zip(BATCHES, NUM_STEPS, strict=True)]
    expected = jax.tree.map(lambda *x: np.mean(x, axis=0), *ends)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state.params, expected
    )
    assert np.abs(state.params["a"] - START["a"]).max() > 0.01


def test_islands_pass_the_loss() -> None:
    optimizer = OPTIMIZERS["polyak"]
    algorithm = algorithms.local_sgd(loss_fn, islands=2, optimizer=optimizer)
    state, _ = jax.jit(algorithm.round)(algorithm.init(START), Cohort(BATCHES))
    ends = [train(optimizer, batches) for batches in BATCHES]
    np.testing.assert_allclose(
        np.asarray(state.params["a"]).reshape(-1, 3)[0],
        np.mean([end["a"] for end in ends], axis=0),
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {"server_optimizer": optax.polyak_sgd(), "client_optimizer": optax.sgd(0.1)}),
        ("fedprox", {"mu": 0.1}),
        ("feddyn", {"alpha": 0.1, "num_clients": 2}),
        ("scaffold", {"num_clients": 2}),
        ("scaffold", {"num_clients": 2, "option": "I"}),
        ("ditto", {"lam": 0.1, "num_clients": 2}),
        ("apfl", {"num_clients": 2, "mixing": 0.5}),
        ("fednova", {}),
        ("mime", {}),
        ("mime_lite", {}),
        ("fedasync", {"mixing": 0.5}),
        ("data_parallel", {}),
    ],
)
def test_steps_that_do_not_follow_the_loss_alone_say_what_is_missing(
    method: str, settings: dict[str, Any]
) -> None:
    size = {"data_parallel": "islands", "fedasync": "max_staleness"}.get(method, "cohort_size")
    optimizer = "optimizer" if method == "data_parallel" else "client_optimizer"
    settings = {size: 2, optimizer: optax.polyak_sgd(), **settings}
    cohort = Cohort(BATCHES[:1] if method == "fedasync" else BATCHES, client_ids=np.arange(2))
    cohort = cohort._replace(client_ids=None) if method == "fedasync" else cohort
    with pytest.raises(TypeError, match=r"scale_by_polyak.*'value'\. Only local steps .* fedavg"):
        algorithm = getattr(algorithms, method)(loss_fn, **settings)
        algorithm.round(algorithm.init(START), cohort)


def test_frozen_leaves_beside_an_optimizer_of_the_loss_are_found() -> None:
    for name in ("polyak", "plateau", "momo"):  # optax does not mask the gradient for lbfgs
        optimizer = OPTIMIZERS[name]
        labels = {"a": "moves", "b": "frozen"}
        split = optax.multi_transform({"moves": optimizer, "frozen": optax.set_to_zero()}, labels)
        assert frozen_leaves(split, START) == [False, True], name


def test_lookahead_names_its_remedy() -> None:
    lookahead = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    with pytest.raises(ValueError, match=r"fedavg\(\): client_optimizer is optax.lookahead.* pair"):
        algorithms.fedavg(loss_fn, cohort_size=2, client_optimizer=lookahead, aggregator=mean())
