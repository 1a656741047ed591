"""The federated methods with unequal clients, with bfloat16, in chunks, and their memory."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import method_problem
import numpy as np
import pytest
from federated_method_table import FEDERATED_METHODS
from method_problem import BATCH, PARTICIPANTS, STEPS, assert_close, random_params
from method_table import METHODS, problem, trainer

from fedpax import Cohort
from fedpax.algorithms import mime_adam, server_adam, server_yogi

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("algorithms")

every_method = pytest.mark.parametrize("name", FEDERATED_METHODS)
STORES = ("SCAFFOLD I", "SCAFFOLD", "FedDyn", "APFL", "Ditto")  # a model per client


def on_device(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


# Methods whose rounds differ most in what they do with a client's steps.
QUICK = ("SCAFFOLD", "FedNova", "Mime", "APFL")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FEDERATED_METHODS],
)
def test_unequal_clients_train_on_their_own_steps(name: str):
    """Against the reference on each client's own batches; clients without any are absent."""
    method = METHODS[name]
    params, rounds, weights = problem(2)
    algorithm = method.algorithm()
    step, state = jax.jit(algorithm.round), algorithm.init(on_device(params))
    own, sizes, result = [], [], []
    for r, (batches, n) in enumerate(zip(rounds, weights, strict=True)):
        num_steps = np.random.default_rng(r).permutation(np.resize(range(STEPS + 1), PARTICIPANTS))
        mask = np.arange(STEPS) < num_steps[:, None]
        mask = np.broadcast_to(mask[..., None], (PARTICIPANTS, STEPS, BATCH))
        own.append({**batches, "mask": mask})
        sizes.append(np.where(num_steps, n, 0))
        padded = {**batches, "x": np.where(mask[..., None], batches["x"], np.nan)}
        cohort = method.cohort(padded, sizes[-1])._replace(num_steps=num_steps)
        state, metrics = step(state, cohort)
        result.append((state.params, metrics))
    for got, wanted in zip(result, method.reference(params, own, sizes), strict=True):
        assert_close(got, wanted)


@every_method
def test_a_round_keeps_bfloat16(name: str):
    """Abstractly: no leaf of the state changes its dtype, and metrics are float32."""
    method = METHODS[name]
    params, (batches,), (weights,) = problem(1)
    algorithm = method.algorithm()
    small = jax.tree.map(lambda p: p.astype(jnp.bfloat16), on_device(params))
    state = jax.eval_shape(algorithm.init, small)
    cohort = method.cohort({**batches, "x": batches["x"].astype(jnp.bfloat16)}, weights)
    after, metrics = jax.eval_shape(algorithm.round, state, cohort)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {jnp.dtype(jnp.bfloat16)}
    assert {metric.dtype for metric in metrics.values()} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("optimizer", [mime_adam, server_adam, server_yogi])
def test_traced_settings_keep_moments_in_bfloat16(optimizer: Callable[..., Any]):
    """A traced setting is float32; it must not widen the state, which a loop carries."""
    params = jnp.ones(3, jnp.bfloat16)

    def step(b1: jax.Array, b2: jax.Array) -> Any:
        made = optimizer(0.1, b1=b1, b2=b2)
        return made.update(params, made.init(params))[1]

    decay = jax.ShapeDtypeStruct((), jnp.float32)
    moments = jax.eval_shape(step, decay, decay)
    assert {moment.dtype for moment in moments} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
@every_method
def test_training_in_bfloat16_agrees_with_float32(name: str):
    method = METHODS[name]
    params, rounds, weights = problem(2)
    algorithm = method.algorithm()
    step = jax.jit(algorithm.round)
    state = algorithm.init(jax.tree.map(lambda p: p.astype(jnp.bfloat16), on_device(params)))
    for batches, n in zip(rounds, weights, strict=True):
        batches = {**batches, "x": batches["x"].astype(jnp.bfloat16)}
        state, metrics = step(state, method.cohort(batches, n))
    wanted, wanted_metrics = method.reference(params, rounds, weights)[-1]
    for leaf, want in wanted.items():
        # bfloat16 has 8 bits: a parameter near 1 is rounded by 0.004 at each of some steps.
        np.testing.assert_allclose(np.float32(state.params[leaf]), want, atol=0.05, rtol=0.03)
    np.testing.assert_allclose(metrics["loss"], wanted_metrics["loss"], rtol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 3])
@every_method
def test_chunk_size_changes_nothing(name: str, chunk_size: int):
    method = METHODS[name]
    params, rounds, weights = problem(2)
    expected = trainer(name, "none").run(params, rounds, weights)
    algorithm = method.algorithm()
    step = jax.jit(algorithm.round.with_options(chunk_size=chunk_size))
    state = algorithm.init(on_device(params))
    for batches, n, wanted in zip(rounds, weights, expected, strict=True):
        state, metrics = step(state, method.cohort(batches, n))
        assert_close((state, metrics), wanted)


@pytest.mark.parametrize(
    "name",
    [
        name if name == "FedNova" else pytest.param(name, marks=pytest.mark.slow)
        for name in FEDERATED_METHODS
        if METHODS[name].placement == "clients"
    ],
)
def test_a_rounds_memory_is_flat_in_clients(name: str):
    """Temporaries of 64 and of 1,024 clients, one at a time.

    Methods with a model per client hold one for each of the cohort, to write back.
    """
    few, many = (temporary_bytes(name, clients) for clients in (64, 1024))
    model = sum(leaf.nbytes for leaf in random_params().values())
    numbers = 16  # weights, which phases share; agnostic's mixture has one for each client
    per_client = numbers + (model if name in STORES else 0)
    assert many - few <= (1024 - 64) * per_client + 0.05 * few


@functools.cache
def temporary_bytes(name: str, clients: int) -> int:
    algorithm = METHODS[name].algorithm(clients)
    integers = jax.ShapeDtypeStruct((clients,), jnp.int32)
    shape = (clients, STEPS, BATCH)
    batches = {
        "x": jax.ShapeDtypeStruct((*shape, method_problem.FEATURES), jnp.float32),
        "label": jax.ShapeDtypeStruct(shape, jnp.int32),
    }
    state = jax.eval_shape(algorithm.init, on_device(random_params()))
    cohort = Cohort(batches, integers, None, integers)
    step = jax.jit(algorithm.round.with_options(chunk_size=1), donate_argnums=0)
    return step.lower(state, cohort).compile().memory_analysis().temp_size_in_bytes
