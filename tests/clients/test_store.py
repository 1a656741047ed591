"""The store of what clients keep: gathered and scattered as NumPy would, and never in one place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_kinds import KINDS, under

from fedpax.clients.store import client_store, gather_clients, scatter_clients
from fedpax.hlo.collectives import collectives

POPULATION, COHORT = 21, 8


@pytest.fixture(params=KINDS)
def current_mesh(request):
    yield from under(request.param)


def random_rounds(rounds, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        clients = rng.permutation(POPULATION)[:COHORT].astype(np.int32)
        clients[rng.random(COHORT) < 0.2] = -1
        yield clients


def place(x, mesh):
    return jnp.asarray(x) if mesh is None else jax.device_put(x, NamedSharding(mesh, P("clients")))


def test_rounds_keep_what_each_client_has_seen(current_mesh):
    """Against a dict on the host, over rounds, with several dtypes."""
    begin = {
        "sum": np.float32([1.0, 2.0]),
        "half": np.ones((2, 3), jnp.bfloat16),
        "count": np.int32(0),
        "seen": np.bool_(False),
    }
    store = client_store(begin, POPULATION)
    kept = {k: jax.tree.map(np.copy, begin) for k in range(POPULATION)}

    def one_round(store, clients):
        own = gather_clients(store, clients)
        own = {
            "sum": own["sum"] + jnp.where(clients < 0, 0, clients)[:, None],
            "half": own["half"] * 2,
            "count": own["count"] + 1,
            "seen": ~own["seen"],
        }
        return scatter_clients(store, clients, own)

    step = jax.jit(one_round, donate_argnums=0)
    for clients in random_rounds(5):
        store = step(store, place(clients, current_mesh))
        for k in clients[clients >= 0]:
            kept[k]["sum"] = kept[k]["sum"] + np.float32(k)
            kept[k]["half"] = kept[k]["half"] * jnp.bfloat16(2)
            kept[k]["count"] = kept[k]["count"] + 1
            kept[k]["seen"] = ~kept[k]["seen"]
    for name in begin:
        rows = np.asarray(store[name])
        assert rows.dtype == begin[name].dtype
        np.testing.assert_array_equal(
            rows[:POPULATION], np.stack([kept[k][name] for k in range(POPULATION)])
        )


def test_gathered_rows_are_zero_where_nobody_is(current_mesh):
    table = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    clients = np.array([5, -1, 23, 0, -1, 7, 8, 1], np.int32)
    found = gather_clients(place(table, current_mesh), place(clients, current_mesh))
    np.testing.assert_array_equal(found, np.where(clients[:, None] < 0, 0, table[clients]))
    if current_mesh is not None:
        assert found.sharding.spec[0] == "clients"


@given(st.lists(st.integers(0, 23), min_size=8, max_size=8, unique=True), st.integers(0, 99))
def test_what_is_scattered_is_gathered(clients, seed):
    rng = np.random.default_rng(seed)
    table, new = rng.normal(size=(24, 2)), rng.normal(size=(8, 2))
    mesh = jax.make_mesh((4,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        store = scatter_clients(
            place(table, mesh), place(np.array(clients), mesh), place(new, mesh)
        )
        np.testing.assert_array_equal(
            gather_clients(store, place(np.array(clients), mesh)), np.float32(new)
        )
    others = np.setdiff1d(np.arange(24), clients)
    np.testing.assert_array_equal(np.asarray(store)[others], np.float32(table)[others])


def test_rows_are_spread_over_the_mesh(current_mesh):
    store = client_store(jnp.zeros(5), POPULATION)
    assert store.shape == ((POPULATION, 5) if current_mesh is None else (24, 5))
    if current_mesh is not None:
        assert {shard.data.shape for shard in store.addressable_shards} == {(6, 5)}


def test_only_the_cohort_crosses_and_nothing_grows_with_the_population(current_mesh):
    """Read from the compiled text, for a population of a million."""
    if current_mesh is None:
        return
    rows, width = 2**20, 64
    over_clients = NamedSharding(current_mesh, P("clients"))
    store = jax.ShapeDtypeStruct((rows, width), jnp.float32, sharding=over_clients)

    def round_(store, clients):
        return scatter_clients(store, clients, gather_clients(store, clients) + 1)

    clients = jax.ShapeDtypeStruct((COHORT,), jnp.int32)
    compiled = jax.jit(round_, donate_argnums=0).lower(store, clients).compile()
    found = collectives(compiled.as_text(), current_mesh)
    assert {c.axes for c in found} == {("clients",)}
    assert max(c.bytes for c in found) <= COHORT * width * 4
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == rows * width  # a quarter of four bytes each, in place
    assert memory.temp_size_in_bytes < 100 * COHORT * width


def test_no_device_holds_the_cohort(current_mesh):
    """A round's temporaries, while the cohort is a few blocks of the size of a device's share."""
    if current_mesh is None:
        return
    cohort, width = 1024, 256
    share = cohort // 4 * width * 4
    over_clients = NamedSharding(current_mesh, P("clients"))
    store = jax.ShapeDtypeStruct((2**12, width), jnp.float32, sharding=over_clients)
    new = jax.ShapeDtypeStruct((cohort, width), jnp.float32, sharding=over_clients)
    clients = jax.ShapeDtypeStruct((cohort,), jnp.int32)

    def temporaries(fn, *arguments, **options):
        compiled = jax.jit(fn, **options).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(gather_clients, store, clients) < 3 * share
    assert temporaries(scatter_clients, store, clients, new, donate_argnums=0) < 3 * share


def test_a_cohort_that_the_mesh_does_not_share_is_refused():
    mesh = jax.make_mesh((4,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        store, clients = client_store(jnp.zeros(2), 10), np.array([0, 3, 5, 7, 8, 9])
        for under_jit in (lambda fn: fn, jax.jit):
            with pytest.raises(ValueError, match=r"cohort of 6 clients .* fill it up with -1 to 8"):
                under_jit(gather_clients)(store, clients)
            with pytest.raises(ValueError, match=r"cohort of 6 clients .* fill it up with -1 to 8"):
                under_jit(scatter_clients)(store, clients, np.zeros((6, 2)))
        padded = np.concatenate([clients, [-1, -1]])
        assert gather_clients(store, padded).shape == (8, 2)


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_a_client_beyond_the_store_is_refused_where_its_number_is_known(array):
    store, clients = 1.0 + jnp.arange(5), array([4, -7, 5])
    for call in (gather_clients, lambda *a: scatter_clients(*a, jnp.zeros(3))):
        with pytest.raises(ValueError, match=r"client 5 has no row in a store of 5 rows: .* 6\."):
            call(store, clients)
    assert jax.jit(gather_clients)(store, clients).tolist() == [5, 0, 0]
    after = jax.jit(scatter_clients)(store, clients, jnp.array([7.0, 8.0, 9.0]))
    assert after.tolist() == [1, 2, 3, 4, 7]


@pytest.mark.parametrize(
    ("state", "population", "error", "message"),
    [
        (jnp.zeros(2), 0, ValueError, "population is 0, expected at least 1"),
        ({"key": jax.eval_shape(jax.random.key, 0)}, 3, TypeError, "keep a number and fold it in"),
        ("name", 3, TypeError, "expected an array of numbers"),
    ],
)
def test_bad_states_are_told(state, population, error, message):
    if isinstance(state, dict):
        state = {"key": jax.random.key(0)}
    with pytest.raises(error, match=message):
        client_store(state, population)
