"""The client store equals NumPy indexing, and no device holds the whole store or cohort."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_kinds import KINDS, under

import fedpax
from fedpax.clients import ClientStore, client_store, gather_clients, scatter_clients
from fedpax.hlo.collectives import collectives

NUM_CLIENTS, COHORT = 21, 8


@pytest.fixture(
    params=[
        k if k in ("no mesh", "automatic", "explicit") else pytest.param(k, marks=pytest.mark.slow)
        for k in KINDS
    ]
)
def current_mesh(request):
    yield from under(request.param)


def random_cohorts(rounds, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        client_ids = rng.permutation(NUM_CLIENTS)[:COHORT].astype(np.int32)
        client_ids[rng.random(COHORT) < 0.2] = -1
        yield client_ids


def place(x, mesh):
    return jnp.asarray(x) if mesh is None else jax.device_put(x, NamedSharding(mesh, P("clients")))


def store_of(table):
    """A store with the rows of a table, one for each client."""
    num_clients = len(table)
    rows = client_store(np.zeros(table.shape[1:], table.dtype), num_clients).rows
    table = np.concatenate(
        [table, np.zeros((len(rows) - num_clients, *rows.shape[1:]), table.dtype)]
    )
    return ClientStore(jax.device_put(table, rows.sharding), num_clients)


def test_each_client_keeps_its_state_over_rounds(current_mesh):
    """Compared with a dict on the host, with several dtypes."""
    initial = {
        "sum": np.float32([1.0, 2.0]),
        "half": np.ones((2, 3), jnp.bfloat16),
        "count": np.int32(0),
        "seen": np.bool_(False),
    }
    store = client_store(initial, NUM_CLIENTS)
    expected = {k: jax.tree.map(np.copy, initial) for k in range(NUM_CLIENTS)}

    def one_round(store, client_ids):
        own = gather_clients(store, client_ids)
        own = {
            "sum": own["sum"] + jnp.where(client_ids < 0, 0, client_ids)[:, None],
            "half": own["half"] * 2,
            "count": own["count"] + 1,
            "seen": ~own["seen"],
        }
        return scatter_clients(store, client_ids, own)

    step = jax.jit(one_round, donate_argnums=0)
    for client_ids in random_cohorts(5):
        store = step(store, place(client_ids, current_mesh))
        for k in client_ids[client_ids >= 0]:
            expected[k]["sum"] = expected[k]["sum"] + np.float32(k)
            expected[k]["half"] = expected[k]["half"] * jnp.bfloat16(2)
            expected[k]["count"] = expected[k]["count"] + 1
            expected[k]["seen"] = ~expected[k]["seen"]
    stacked = {name: np.stack([expected[k][name] for k in range(NUM_CLIENTS)]) for name in initial}
    chex.assert_trees_all_equal(store.to_host(), stacked)
    chex.assert_trees_all_equal_shapes_and_dtypes(store.to_host(), stacked)


def test_absent_clients_read_zeros(current_mesh):
    table = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    client_ids = np.array([5, -1, 23, 0, -7, 7, 8, 1], np.int32)
    result = gather_clients(store_of(table), place(client_ids, current_mesh))
    np.testing.assert_array_equal(result, np.where(client_ids[:, None] < 0, 0, table[client_ids]))
    if current_mesh is not None:
        assert result.sharding.spec[0] == "clients"


def test_states_of_absent_clients_are_ignored(current_mesh):
    table = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    client_ids = np.array([-1, 4, -7, -1, -1, 2, -1, -1], np.int32)
    new = np.full((8, 3), np.nan, np.float32)
    new[[1, 5]] = np.random.default_rng(1).normal(size=(2, 3))
    store = scatter_clients(
        store_of(table), place(client_ids, current_mesh), place(new, current_mesh)
    )
    table[[4, 2]] = new[[1, 5]]
    np.testing.assert_array_equal(store.to_host(), table)


def test_gather_and_scatter_work_inside_a_program(current_mesh):
    """A method with client state in its own words: absent clients need no mask."""

    @fedpax.program(clients=COHORT)
    def add_to_each(store, client_ids, x):
        own = gather_clients(store, client_ids)
        own = fedpax.federated_map(lambda own, x: own + 2 * x, own, x)
        total = fedpax.federated_sum(own) / store.num_clients
        return scatter_clients(store, client_ids, own), total

    table = np.random.default_rng(2).normal(size=(NUM_CLIENTS, 3)).astype(np.float32)
    padding = np.zeros((24 - NUM_CLIENTS, 3), np.float32)
    with_padding = np.concatenate([table, padding])
    store = client_store(jnp.zeros(3), NUM_CLIENTS)
    ids = np.concatenate([np.arange(NUM_CLIENTS), np.full(24 - NUM_CLIENTS, -1)])
    store = scatter_clients(store, place(ids, current_mesh), place(with_padding, current_mesh))
    x = np.random.default_rng(3).normal(size=(COHORT, 3)).astype(np.float32)
    step = jax.jit(add_to_each)
    for client_ids in random_cohorts(3):
        store, total = step(store, place(client_ids, current_mesh), place(x, current_mesh))
        present = client_ids >= 0
        own = np.where(present[:, None], table[client_ids], 0) + 2 * x
        table[client_ids[present]] = own[present]
        np.testing.assert_allclose(total, own.sum(0) / NUM_CLIENTS, rtol=1e-5)
        np.testing.assert_allclose(store.to_host(), table, rtol=1e-6)


@given(st.lists(st.integers(0, 23), min_size=8, max_size=8, unique=True), st.integers(0, 99))
def test_gather_returns_what_scatter_wrote(client_ids, seed):
    rng = np.random.default_rng(seed)
    table, new = rng.normal(size=(24, 2)), rng.normal(size=(8, 2))
    table, new, client_ids = np.float32(table), np.float32(new), np.array(client_ids)
    mesh = jax.make_mesh((4,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        store = scatter_clients(store_of(table), place(client_ids, mesh), place(new, mesh))
        np.testing.assert_array_equal(gather_clients(store, place(client_ids, mesh)), new)
    others = np.setdiff1d(np.arange(24), client_ids)
    np.testing.assert_array_equal(store.to_host()[others], table[others])


def test_rows_are_sharded_over_the_mesh(current_mesh):
    store = client_store(jnp.zeros(5), NUM_CLIENTS)
    assert store.rows.shape == (24, 5)
    if current_mesh is not None:
        assert {shard.data.shape for shard in store.rows.addressable_shards} == {(6, 5)}


@pytest.mark.each_value
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("num_clients", [1, 5, 8, 51])
def test_shapes_do_not_depend_on_the_number_of_devices(devices, num_clients):
    with jax.set_mesh(fedpax.make_mesh(devices=jax.devices()[:devices], clients=devices)):
        store = client_store({"control": jnp.zeros((2, 3))}, num_clients)
    alone = client_store({"control": jnp.zeros((2, 3))}, num_clients)
    chex.assert_trees_all_equal_shapes_and_dtypes(store, alone)
    assert store.num_clients == num_clients
    assert store.to_host()["control"].shape == (num_clients, 2, 3)


def test_the_number_of_clients_is_an_integer_under_jit():
    store = client_store(jnp.zeros(3), num_clients=51)
    mean = jax.jit(lambda store: jnp.sum(store.rows, 0) / jnp.ones(store.num_clients).sum())
    np.testing.assert_array_equal(mean(store), np.zeros(3))
    assert jax.eval_shape(lambda s: s, store).num_clients == 51


def test_only_the_cohort_is_communicated_and_nothing_grows_with_the_population(current_mesh):
    """Read from the compiled text, for a population of a million."""
    if current_mesh is None:
        return
    num_clients, width = 2**20, 64
    over_clients = NamedSharding(current_mesh, P("clients"))
    rows = jax.ShapeDtypeStruct((num_clients, width), jnp.float32, sharding=over_clients)
    store = ClientStore(rows, num_clients)

    def round_(store, client_ids):
        return scatter_clients(store, client_ids, gather_clients(store, client_ids) + 1)

    client_ids = jax.ShapeDtypeStruct((COHORT,), jnp.int32)
    compiled = jax.jit(round_, donate_argnums=0).lower(store, client_ids).compile()
    communication = collectives(compiled.as_text(), current_mesh)
    assert {c.axes for c in communication} == {("clients",)}
    assert max(c.bytes for c in communication) <= COHORT * width * 4
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == num_clients * width  # a quarter of 4 bytes each, in place
    assert memory.temp_size_in_bytes < 100 * COHORT * width


def test_no_device_holds_the_whole_cohort(current_mesh):
    """A round's temporaries stay below three blocks of cohort/devices rows."""
    if current_mesh is None:
        return
    cohort, width = 1024, 256
    share = cohort // 4 * width * 4
    over_clients = NamedSharding(current_mesh, P("clients"))
    rows = jax.ShapeDtypeStruct((2**12, width), jnp.float32, sharding=over_clients)
    store = ClientStore(rows, 2**12)
    new = jax.ShapeDtypeStruct((cohort, width), jnp.float32, sharding=over_clients)
    client_ids = jax.ShapeDtypeStruct((cohort,), jnp.int32)

    def temporaries(fn, *arguments, **options):
        compiled = jax.jit(fn, **options).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(gather_clients, store, client_ids) < 3 * share
    assert temporaries(scatter_clients, store, client_ids, new, donate_argnums=0) < 3 * share


def test_a_cohort_that_the_mesh_axis_does_not_divide_raises():
    mesh = jax.make_mesh((4,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    message = r"client_ids has 6 entries, .* 4 devices .* do not divide\. Pad it with -1 to 8"
    with jax.set_mesh(mesh):
        store, client_ids = client_store(jnp.zeros(2), 10), np.array([0, 3, 5, 7, 8, 9])
        for transform in (lambda fn: fn, jax.jit):
            with pytest.raises(ValueError, match=message):
                transform(gather_clients)(store, client_ids)
            with pytest.raises(ValueError, match=message):
                transform(scatter_clients)(store, client_ids, np.zeros((6, 2)))
        padded = np.concatenate([client_ids, [-1, -1]])
        assert gather_clients(store, padded).shape == (8, 2)


@pytest.mark.parametrize("array", [np.array, jnp.array])
@pytest.mark.parametrize("beyond", [5, 6, 8, 10**6])  # 5 and 6 are padding rows
def test_an_index_beyond_the_population_raises_or_is_ignored_under_jit(array, beyond):
    store, client_ids = store_of(1.0 + np.arange(5, dtype=np.float32)), array([4, -7, beyond])
    message = rf"contains {beyond}, but the store has 5 clients .* num_clients={beyond + 1}\)"
    for call in (gather_clients, lambda *a: scatter_clients(*a, jnp.zeros(3))):
        with pytest.raises(ValueError, match=message):
            call(store, client_ids)
    assert jax.jit(gather_clients)(store, client_ids).tolist() == [5, 0, 0]
    after = jax.jit(scatter_clients)(store, client_ids, jnp.array([7.0, 8.0, 9.0]))
    assert after.to_host().tolist() == [1, 2, 3, 4, 7]
    assert not np.asarray(after.rows)[5:].any()


def test_a_plain_array_is_no_store():
    with pytest.raises(TypeError, match=r"gather_clients\(\): store is a .*Make it with client_st"):
        gather_clients(jnp.zeros((4, 2)), np.array([1]))


@pytest.mark.parametrize(
    ("state", "num_clients", "error", "message"),
    [
        (lambda: jnp.zeros(2), 0, ValueError, "num_clients is 0, expected at least 1"),
        (
            lambda: {"key": jax.random.key(0)},
            3,
            TypeError,
            r"state\['key'\] is of type .*store an integer and fold it in",
        ),
        (lambda: "name", 3, TypeError, "expected an array of numbers"),
    ],
)
def test_bad_initial_states_raise(state, num_clients, error, message):
    with pytest.raises(error, match=message):
        client_store(state(), num_clients)


def test_the_derivative_of_a_write_is_that_of_numpy_indexing(current_mesh):
    """Also of rows that are sharded over a model axis."""
    client_ids = np.int32([3, -1, 20, 0, 7, -1, 8, 1])
    rng = np.random.default_rng(0)
    states, slopes = rng.normal(size=(COHORT, 4)), rng.normal(size=(COHORT, 4))

    def put(x, *axes):
        x = jnp.asarray(x, jnp.float32)
        return (
            x if current_mesh is None else jax.device_put(x, NamedSharding(current_mesh, P(*axes)))
        )

    store, ids = (
        client_store(put(np.zeros(4), "fsdp"), NUM_CLIENTS),
        place(client_ids, current_mesh),
    )

    def written(states, slopes):
        read = gather_clients(scatter_clients(store, ids, states), ids)
        return jnp.sum(read * slopes)

    states, slopes = put(states, "clients", "fsdp"), put(slopes, "clients", "fsdp")
    gradient = jax.jit(jax.grad(written))(states, slopes)
    expected = np.where(client_ids[:, None] >= 0, slopes, 0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.parametrize("current_mesh", [k for k in KINDS if KINDS[k]], indirect=True)
def test_no_device_gathers_rows_over_a_model_axis(current_mesh):
    def put(x, *axes):
        return jax.device_put(x, NamedSharding(current_mesh, P(*axes)))

    store = client_store(put(np.zeros(4096, np.float32), "fsdp"), NUM_CLIENTS)
    assert store.rows.sharding.spec == P("clients", "fsdp")
    ids = put(np.arange(8, dtype=np.int32), "clients")
    states = put(np.ones((8, 4096), np.float32), "clients", "fsdp")
    for fn, arguments in ((gather_clients, (store, ids)), (scatter_clients, (store, ids, states))):
        text = jax.jit(fn).lower(*arguments).compile().as_text()
        assert "f32[2,2048]" in text and ",4096]" not in text


def test_values_that_the_store_cannot_hold_raise():
    store = client_store(np.zeros(2, np.int64), 5)
    with pytest.raises(ValueError, match=r"client_store\(\): state\['a'\] has the value 109951162"):
        client_store({"a": np.array(2**40)}, 5)
    with pytest.raises(
        ValueError, match=r"scatter_clients\(\): states has the value 1099511627776"
    ):
        scatter_clients(store, np.array([0]), np.array([[2**40, 1]]))
    with pytest.raises(TypeError, match=r"states has dtype float32, but the store has int32"):
        scatter_clients(store, jnp.array([0]), jnp.array([[0.5, 1.0]]))


def test_any_negative_index_is_absent():
    store = client_store(np.ones(2, np.float32), 5)
    result = gather_clients(store, np.array([-(2**32), 1, -(2**31) - 1]))
    assert result.tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("client_ids", [np.array([0.0, 1.0]), jnp.array([0.5, jnp.nan]), [True]])
def test_indices_that_are_no_integers_raise(client_ids):
    store = client_store({"a": np.ones(2, np.float32)}, 5)
    with pytest.raises(TypeError, match=r"client_ids has dtype (float|bool)\w*, expected integers"):
        gather_clients(store, client_ids)
    with pytest.raises(TypeError, match=r"state\['a'\] .*dtype object.*\.astype\(np\.float32\)"):
        client_store({"a": np.array([1, None])}, 5)


@pytest.mark.parametrize("num_clients", [2.5, "5", None, np.array([3]), 1e3, float("nan")])
def test_a_number_of_clients_that_is_no_integer_raises(num_clients):
    with pytest.raises(TypeError, match=r"num_clients is .*, expected an integer"):
        client_store(np.zeros(3, np.float32), num_clients)


@pytest.mark.parametrize("ids", [None, 3, np.array(["a"]), np.array([1, None])])
def test_indices_of_another_form_raise(ids):
    store = client_store({"w": np.zeros(3, np.float32)}, 5)
    words = r"client_ids (has dtype \S+, expected integers|is one number, expected integers)"
    with pytest.raises((TypeError, ValueError), match=words):
        gather_clients(store, ids)
    with pytest.raises((TypeError, ValueError), match=words):
        scatter_clients(store, ids, {"w": np.zeros((2, 3), np.float32)})


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ({"w": np.ones((3, 3))}, r"states\['w'\] has shape \[3, 3\], expected \[2, 3\]"),
        ({"w": np.ones((2, 4))}, r"states\['w'\] has shape \[2, 4\], expected \[2, 3\]"),
        ({"w": np.ones((2, 3), complex)}, r"states\['w'\] has dtype complex64, but the store has"),
        ({"w": np.full((2, 3), "a")}, r"states\['w'\] has dtype <U1"),
        ({"v": np.ones((2, 3))}, "states has the structure .*'v'.*, expected .*'w'"),
        ({"w": np.ones((2, 3)), "b": np.ones(2)}, "states has the structure"),
        (None, "states has the structure"),
    ],
)
def test_states_of_another_form_raise(states, words):
    store = client_store({"w": np.zeros(3, np.float32)}, 5)
    for run in (scatter_clients, jax.jit(lambda *a: scatter_clients(store, *a[1:]))):
        if run is not scatter_clients and "dtype <U1" in words:
            continue  # JAX refuses it
        with pytest.raises((TypeError, ValueError), match=words):
            run(store, np.array([0, 1]), states)


def test_a_client_that_is_twice_in_client_ids_raises():
    store = client_store(np.float32(0), NUM_CLIENTS)
    twice, states = np.array([3, -1, 3, -1]), np.arange(4, dtype=np.float32)
    with pytest.raises(ValueError, match=r"scatter_clients\(\): client_ids has the client 3 more"):
        scatter_clients(store, twice, states)
    assert gather_clients(store, twice).tolist() == [0, 0, 0, 0]  # a read is defined
