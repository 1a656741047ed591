"""A loop over a cohort reads and writes the rows of a store: NumPy's values, and no copies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpax
from fedpax import Cohort
from fedpax.algorithms import ditto, feddyn, scaffold
from fedpax.clients import ClientStore, gather_clients, scatter_clients

COHORT, NUM_CLIENTS = 7, 20
IDS = np.int32([3, -1, 19, 0, 25, 8, 4])  # one is absent, and one is beyond the population
SEEN = [0, 2, 3, 5, 6]


def tables(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "control": rng.normal(size=(24, 3, 2)).astype(np.float32),
        "rounds": rng.integers(0, 9, 24).astype(np.int32),
    }


def rounds_of(variant, chunk_size):
    """Return a program that updates a store, and some value of the round."""

    def update(state, x):
        control = jnp.tanh(state["control"] * x) + 1
        return {"control": control, "rounds": state["rounds"] + 1}, jnp.sum(state["control"]) * x

    @fedpax.program(clients=COHORT, chunk_size=chunk_size)
    def program(store, ids, x):
        states = gather_clients(store, ids)
        new, values = fedpax.federated_map(update, states, x)
        result = fedpax.federated_sum(values)
        if variant == "states are read again":
            result += jnp.sum(states["control"] ** 2)
        if variant == "new states are reduced":
            result += jnp.sum(fedpax.federated_sum(new)["control"])
        if variant == "a later loop reads the states":
            result += fedpax.federated_sum(
                fedpax.federated_map(lambda s, r: jnp.sum(s["control"]) * r, states, x + result)
            )
        if variant == "the store is returned too":
            result = result, store.rows["rounds"]
        after = scatter_clients(store, ids, new)
        if variant == "it is written twice":
            after = scatter_clients(after, ids, jax.tree.map(lambda s: s + 1, new))
        return after, result

    def reference(table, x):
        old = {
            k: np.where(
                np.isin(range(COHORT), SEEN).reshape(-1, *[1] * (v.ndim - 1)), v[IDS % 24], 0
            )
            for k, v in table.items()
        }
        x_ = x.reshape(-1, 1, 1)
        new = {"control": np.tanh(old["control"] * x_) + 1, "rounds": old["rounds"] + 1}
        result = np.sum(old["control"].sum((1, 2)) * x)
        if variant == "states are read again":
            result += np.sum(old["control"] ** 2)
        if variant == "new states are reduced":
            result += np.sum(new["control"])
        if variant == "a later loop reads the states":
            result += np.sum(old["control"].sum((1, 2)) * (x + result))
        if variant == "the store is returned too":
            result = result, table["rounds"]
        more = variant == "it is written twice"
        after = {k: v.copy() for k, v in table.items()}
        for k in after:
            after[k][IDS[SEEN]] = new[k][SEEN] + more
        return after, result

    return program, reference


@pytest.mark.parametrize("chunk_size", [1, 3, None])
@pytest.mark.parametrize(
    "variant",
    [
        "",
        "states are read again",
        "new states are reduced",
        "a later loop reads the states",
        "the store is returned too",
        "it is written twice",
    ],
)
def test_rows_are_those_of_numpy(variant, chunk_size):
    program, reference = rounds_of(variant, chunk_size)
    table, x = tables(), np.random.default_rng(1).normal(size=COHORT).astype(np.float32)
    store = ClientStore(jax.tree.map(jnp.asarray, table), NUM_CLIENTS)
    after, result = jax.jit(program)(store, IDS, x)
    expected, wanted = reference(table, x)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, after.rows, expected)
    jax.tree.map(close, result, wanted)


@pytest.mark.parametrize("method", [scaffold, feddyn, ditto])
@pytest.mark.parametrize("chunk_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_temporaries_do_not_grow_with_the_cohort(method, chunk_size):
    """The state is updated in place, and no array has the states of the cohort."""
    width = 2**14
    extra = {scaffold: {}, feddyn: {"alpha": 0.1}, ditto: {"lam": 0.1}}[method]

    def temporaries(cohort_size):
        algorithm = method(
            lambda w, x: (jnp.mean((w - x) ** 2), {}),
            cohort_size=cohort_size,
            num_clients=100,
            client_optimizer=optax.sgd(0.1),
            chunk_size=chunk_size,
            **extra,
        )
        state = jax.eval_shape(algorithm.init, jax.ShapeDtypeStruct((width,), jnp.float32))
        ids = jax.ShapeDtypeStruct((cohort_size,), jnp.int32)
        cohort = Cohort(jax.ShapeDtypeStruct((cohort_size, 1, 1), jnp.float32), client_ids=ids)
        compiled = jax.jit(algorithm.round, donate_argnums=0).lower(state, cohort).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes > 4 * 100 * width
        return memory.temp_size_in_bytes

    few, many = temporaries(10), temporaries(70)
    assert many - few < 4 * width  # not one state more


def test_the_derivative_of_a_round_with_a_store_is_that_without_loops():
    program, _ = rounds_of("", 1)
    table = {"control": tables()["control"], "rounds": np.zeros(24, np.float32)}
    x = jnp.asarray(np.random.default_rng(1).normal(size=COHORT), jnp.float32)

    def total(control, x, program):
        rows = {"control": control, "rounds": jnp.asarray(table["rounds"])}
        after, result = program(ClientStore(rows, NUM_CLIENTS), IDS, x)
        return jnp.sum(jnp.sin(after.rows["control"])) + result

    def plain(store, ids, x):
        seen = jnp.isin(jnp.arange(COHORT), jnp.array(SEEN))[:, None, None]
        old = jnp.where(seen, store.rows["control"][ids % 24], 0)
        new = jnp.tanh(old * x[:, None, None]) + 1
        where = jnp.where(seen[:, 0, 0], ids, 24)
        control = store.rows["control"].at[where].set(new, mode="drop")
        after = ClientStore({"control": control}, NUM_CLIENTS)
        return after, jnp.sum(old.sum((1, 2)) * x)

    control = jnp.asarray(table["control"])
    found, expected = (
        jax.jit(jax.grad(functools.partial(total, program=p), argnums=(0, 1)))(control, x)
        for p in (program, plain)
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, expected
    )
