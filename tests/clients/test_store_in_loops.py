"""A loop over a cohort reads and writes the rows of a store: NumPy's values, and no copies."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax import Cohort
from fedpax.algorithms import ditto, feddyn, scaffold
from fedpax.clients import ClientStore, gather_clients, scatter_clients
from fedpax.hlo.collectives import collectives, operand_bytes_along
from fedpax.hlo.parsing import parse
from fedpax.primitives.client_rows import Chunk, ClientRows, RowRing, count_hops

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


@pytest.mark.each_value
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


def temporaries_of(method, cohort_size, chunk_size, num_devices):
    """Return a round's temporaries in states of a client, and its compiled text and mesh."""
    width = 2**14
    extra = {scaffold: {}, feddyn: {"alpha": 0.1}, ditto: {"lam": 0.1}}[method]
    algorithm = method(
        lambda w, x: (jnp.mean((w - x) ** 2), {}),
        cohort_size=cohort_size,
        num_clients=96,
        client_optimizer=optax.sgd(0.1),
        chunk_size=chunk_size,
        **extra,
    )
    mesh = fedpax.make_mesh(devices=jax.devices()[:num_devices], clients=num_devices)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(algorithm.init, jax.ShapeDtypeStruct((width,), jnp.float32))
        over_clients = NamedSharding(mesh, P("clients"))
        state = jax.tree.map(
            lambda x: x.update(sharding=over_clients) if x.shape[:1] == (96,) else x, state
        )
        ids = jax.ShapeDtypeStruct((cohort_size,), jnp.int32)
        cohort = Cohort(jax.ShapeDtypeStruct((cohort_size, 1, 1), jnp.float32), client_ids=ids)
        compiled = jax.jit(algorithm.round, donate_argnums=0).lower(state, cohort).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes > 4 * 96 // num_devices * width  # the store stays in place
    return memory.temp_size_in_bytes / width / 4, compiled.as_text(), mesh


@pytest.mark.parametrize(
    ("method", "num_devices", "chunk_size"),
    [
        *((method, 1, 1) for method in (scaffold, feddyn, ditto)),
        (scaffold, 2, 1),
        *(
            pytest.param(method, devices, chunk_size, marks=pytest.mark.slow)
            for method in (scaffold, feddyn, ditto)
            for devices, chunk_size in ((1, 3), (2, 1), (2, 3), (8, 1))
            if (method, devices, chunk_size) != (scaffold, 2, 1)
        ),
    ],
)
def test_temporaries_do_not_grow_with_the_cohort(method, num_devices, chunk_size):
    """The store is updated in place, no array has the cohort's states, and no rows are gathered."""
    (few, _, _), (many, text, mesh) = (
        temporaries_of(method, size, chunk_size, num_devices) for size in (16, 64)
    )
    assert many - few < 1  # not one state more
    assert few < 20 * chunk_size
    if num_devices > 1:  # bytes are counted without rows, whose moves depend on the cohort
        total = operand_bytes_along(text, mesh, "clients")
        assert 4 * 2**14 < total < 2.1 * 4 * 2**14  # of a sum or two
        if chunk_size == 1:
            assert not computed_where_rows_are_written(text, 96 // num_devices)
    for collective in collectives(text, mesh):
        is_of_rows = collective.bytes > 2**14  # of the store's or the cohort's, and not indices
        assert collective.kind in ("all-reduce", "collective-permute") or not is_of_rows


def computed_where_rows_are_written(text, rows):
    """Return the arithmetic that is fused with a write of rows: the ring's states need it too."""
    return [
        instruction.opcode
        for computation in parse(text).computations.values()
        if f"f32[{rows}," in computation.root.shape
        for instruction in computation.instructions.values()
        if instruction.shape.startswith("f32") and instruction.opcode in ("multiply", "subtract")
    ]


def run_on_devices(program, store, ids, x, num_devices):
    with jax.set_mesh(fedpax.make_mesh(devices=jax.devices()[:num_devices], clients=num_devices)):
        rows = jax.device_put(store.rows, P("clients"))
        return jax.jit(program)(ClientStore(rows, store.num_clients), ids, x)


@functools.cache
def programs(cohort, chunk_size):
    """Return a program that updates a store, once for all examples of hypothesis."""

    @fedpax.program(clients=cohort, chunk_size=chunk_size)
    def program(store, ids, x):
        new, values = fedpax.federated_map(
            lambda s, x: (
                {"control": s["control"] * x + 1, "rounds": s["rounds"] + 1},
                jnp.sum(s["control"]) + x,
            ),
            gather_clients(store, ids),
            x,
        )
        return scatter_clients(store, ids, new), fedpax.federated_sum(values)

    return program


@pytest.mark.parametrize(
    ("num_devices", "chunk_size"),
    [(2, 1), (2, None), (4, 3), *(pytest.param(8, c, marks=pytest.mark.slow) for c in (1, None))],
)
@settings(max_examples=15)
@given(data=st.data())
def test_rows_on_several_devices_are_those_of_numpy(num_devices, chunk_size, data):
    """Clients at home, clients that move between any two devices, absent and invalid ones."""
    cohort = num_devices * (1 if num_devices == 8 else 4)
    known = st.lists(st.integers(0, 23), min_size=cohort, max_size=cohort, unique=True)
    ids = np.array(data.draw(known), np.int32)
    absent = data.draw(st.lists(st.booleans(), min_size=cohort, max_size=cohort))
    ids = np.where(absent, data.draw(st.sampled_from([-1, -5])), ids)
    table = tables(seed=data.draw(st.integers(0, 9)))
    x = np.random.default_rng(1).normal(size=cohort).astype(np.float32)
    store = ClientStore(jax.tree.map(jnp.asarray, table), NUM_CLIENTS)
    after, total = run_on_devices(programs(cohort, chunk_size), store, ids, x, num_devices)
    seen = (ids >= 0) & (ids < NUM_CLIENTS)
    own = np.where(seen[:, None, None], table["control"][ids % 24], 0)
    expected = {k: v.copy() for k, v in table.items()}
    expected["control"][ids[seen]] = (own * x[:, None, None] + 1)[seen]
    expected["rounds"][ids[seen]] += 1
    # A product near -1 cancels: its rounding, or none in a fused multiply-add, remains.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=2.0**-23)
    jax.tree.map(close, after.rows, expected)
    np.testing.assert_allclose(total, np.sum(own.sum((1, 2)) + x), rtol=1e-4, atol=1e-5)


@given(data=st.data())
def test_rows_move_no_further_than_to_the_farthest_client(data):
    """Rows of clients at home are not sent at all."""
    ids = np.array(data.draw(st.lists(st.integers(-2, 23), min_size=8, max_size=8)), np.int32)
    start = data.draw(st.integers(0, 1))
    chunk = ids.reshape(4, 2)[:, start]
    expected = max((device - k // 6) % 4 if k >= 0 else 0 for device, k in enumerate(chunk))
    assert hops(4)(ids, start).tolist() == [expected] * 4


@functools.cache
def hops(devices):
    def on_device(ids, start):
        ring = RowRing("clients", devices)
        chunk = Chunk(ClientRows(jnp.zeros((6, 2)), ids), start, 1, ring)
        return count_hops([chunk], ring)[None]

    mesh = fedpax.make_mesh(devices=jax.devices()[:devices], clients=devices)
    return jax.jit(
        jax.shard_map(
            on_device, mesh=mesh, in_specs=(P(), P()), out_specs=P("clients"), check_vma=False
        )
    )


def test_small_states_are_sent_together_and_keep_every_bit():
    rng = np.random.default_rng(2)
    shapes = [(2,), (2, 5), (2, 1 << 14), (2, 3, 2), ()]
    types = [np.float32, np.float32, np.float32, np.int32, np.int32]
    states = [rng.integers(-99, 99, (4, *s)).astype(t) for s, t in zip(shapes, types, strict=True)]
    ring = RowRing("clients", 4)
    mesh = fedpax.make_mesh(devices=jax.devices()[:4], clients=4)

    def on_device(states):
        passed = ring.pass_on([x[0] for x in states], 1)
        return [x[None] for x in passed]

    spec = P("clients")
    pass_on = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec))
    for passed, state in zip(pass_on(states), states, strict=True):
        assert passed.dtype == state.dtype
        assert np.array_equal(passed, np.roll(state, 1, axis=0))
    # Two small arrays of each dtype, and a large one.
    text = pass_on.lower(states).as_text()
    assert text.count("collective_permute") == 3


def test_rows_are_sharded_over_another_axis_too():
    """The loop is manual over the clients' axis alone."""
    rng = np.random.default_rng(3)
    ids = np.int32([3, -1, 19, 0, 13, 8, 4, 15])
    table = tables()
    x = rng.normal(size=8).astype(np.float32)
    program = programs(8, 1)
    with jax.set_mesh(fedpax.make_mesh(devices=jax.devices()[:4], clients=2, fsdp=2)):
        rows = {
            "control": jax.device_put(table["control"], P("clients", None, "fsdp")),
            "rounds": jax.device_put(table["rounds"], P("clients")),
        }
        after, _ = jax.jit(program, donate_argnums=0)(ClientStore(rows, NUM_CLIENTS), ids, x)
        assert after.rows["control"].sharding.shard_shape((24, 3, 2)) == (12, 3, 1)
    expected = table["control"].copy()
    for k, factor in zip(ids, x, strict=True):
        if k >= 0:
            expected[k] = expected[k] * factor + 1
    np.testing.assert_allclose(after.rows["control"], expected, rtol=1e-6)


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
    gradient, expected = (
        jax.jit(jax.grad(functools.partial(total, program=p), argnums=(0, 1)))(control, x)
        for p in (program, plain)
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), gradient, expected
    )


@pytest.mark.each_value
@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("batched", list(itertools.product((0, None), repeat=3))[:-1])
def test_vmap_over_states_ids_and_arguments(batched, chunk_size):
    """All sizes are 3, so that shapes do not tell the axes apart."""

    @fedpax.program(clients=3, chunk_size=chunk_size)
    def update(store, ids, x):
        states = gather_clients(store, ids)
        new = fedpax.federated_map(lambda state, x: jnp.tanh(state) * x + 1, states, x)
        return scatter_clients(store, ids, new).rows, fedpax.federated_sum(new)

    rng = np.random.default_rng(4)
    rows = rng.normal(size=(3, 3, 3)).astype(np.float32)
    ids, x = np.int32([[0, 2, 1], [2, -1, 0], [1, 0, 2]]), rng.normal(size=(3, 3)).astype("f")

    def run(rows, ids, x):
        return update(ClientStore(rows, 3), ids, x)

    given = [v if axis == 0 else v[0] for v, axis in zip((rows, ids, x), batched, strict=True)]
    together = jax.jit(jax.vmap(run, batched))(*given)
    for i in range(3):
        alone = [v[i] if axis == 0 else v for v, axis in zip(given, batched, strict=True)]
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-6), together, run(*alone)
        )
