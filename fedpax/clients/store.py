"""Client store: one state per client of the population, sharded over the mesh."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from fedpax.checks import check_integers
from fedpax.clients.cohort import check_distinct_clients
from fedpax.clients.row_blocks import count_rows, on_devices, row_specs, rows_axis, state_spec
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives.casts import checked_tree, conversion, device_array
from fedpax.primitives.client_rows import (
    ClientRows,
    RowRing,
    absent_beyond,
    read_clients,
    write_clients,
)
from fedpax.primitives.user_functions import check_tree_not_deleted
from fedpax.transforms.marks import KEPT, READ_CLIENTS, WRITE_CLIENTS

if TYPE_CHECKING:  # chex imports absl.flags
    import chex

State = TypeVar("State", bound="chex.ArrayTree")
ClientIds = Int[jax.Array | np.ndarray, "cohort"]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["num_clients"]
)
@dataclasses.dataclass(frozen=True)
class ClientStore(Generic[State]):
    """The states of all clients of a population, as one pytree.

    It can be part of an algorithm's state. `num_clients` is static, a Python integer under
    `jax.jit` too.

    Attributes:
        rows: a pytree of arrays `[rows, ...]`, row k for client k. `rows` is `num_clients` rounded
            up to a multiple of 8 and of the number of devices on the placement's mesh axis. Rows
            from `num_clients` on are padding.
        num_clients: the size of the population.
    """

    rows: State
    num_clients: int

    def to_host(self) -> State:
        """Return the states of all clients as NumPy arrays `[num_clients, ...]`."""
        return jax.tree.map(lambda rows: np.asarray(rows)[: self.num_clients], self.rows)


def client_store(
    state: State, num_clients: int, *, placement: str = "clients"
) -> ClientStore[State]:
    """Make a store in which every client of a population has the same initial state.

    Args:
        state: a pytree of arrays, the state of a client that has not taken part yet.
        num_clients: the size of the population.
        placement: the name of the mesh axis to shard the rows over. Without it, one device holds
            all rows.

    Returns:
        The store.

    Raises:
        ValueError: `num_clients` is below 1.
        TypeError: a leaf is not an array of numbers or booleans.

    Example:
        >>> store = client_store({"control": jnp.zeros(3)}, num_clients=5)
        >>> store.num_clients, store.to_host()["control"].shape
        (5, (5, 3))
    """
    check_integers(num_clients=num_clients)
    if num_clients < 1:
        raise ArgumentError(f"client_store(): num_clients is {num_clients}, expected at least 1.")
    axis, num_devices = rows_axis(placement)
    num_rows = count_rows(num_clients, num_devices)

    leaves, tree = jax.tree.flatten_with_path(state)
    arrays = [_check_leaf(leaf, path) for path, leaf in leaves]

    def fill(arrays: list[jax.Array]) -> list[jax.Array]:
        return [jnp.broadcast_to(a, (num_rows // num_devices, *a.shape)) for a in arrays]

    make = fill
    if axis is not None:
        specs = [state_spec(a, axis) for a in arrays]
        make = on_devices(fill, (specs,), [P(axis, *spec) for spec in specs])
    return ClientStore(jax.tree.unflatten(tree, jax.jit(make)(arrays)), num_clients)


def gather_clients(
    store: ClientStore[State], client_ids: ClientIds, *, placement: str = "clients"
) -> State:
    """Read the states of a cohort.

    Inside a `fedpax.program`, the result is a placed value, one slice per participant.

    Args:
        store: as `client_store` makes it.
        client_ids: integers `[cohort]`, as in `Cohort.client_ids`; negative where a client is
            absent. The mesh axis must divide `cohort`.
        placement: the name of the mesh axis.

    Returns:
        The pytree with leaves `[cohort, ...]`; zeros for absent clients, and under `jax.jit`, which
        cannot raise, for an index that is not below `num_clients`.

    Raises:
        TypeError: `store` is not a `ClientStore`.
        ValueError: the mesh axis does not divide the cohort; or, outside of `jax.jit`, an index is
            not below `num_clients`.

    Example:
        >>> store = scatter_clients(client_store(jnp.zeros(2), 5), jnp.array([3]), jnp.ones((1, 2)))
        >>> gather_clients(store, jnp.array([3, -1, 0])).tolist()
        [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    """
    client_ids = _check_call("gather_clients", store, client_ids, placement)
    leaves, tree = jax.tree.flatten(store.rows)
    states = _read_clients(placement)(*leaves, client_ids, store.num_clients)
    return jax.tree.unflatten(tree, states)


@functools.cache
def _read_clients(placement: str) -> Any:
    """Return `(*rows, client_ids, num_clients) -> states`, which a loop over a cohort can find."""

    def read(*arguments: Any) -> list[jax.Array]:
        *rows, client_ids, num_clients = arguments
        axis, num_devices = rows_axis(placement)

        def on_device(rows: list[Any], client_ids: jax.Array) -> list[jax.Array]:
            values = [ClientRows(leaf, client_ids) for leaf in rows]
            ring = None if axis is None else RowRing(axis, num_devices)
            return read_clients(values, 0, len(client_ids) // num_devices, ring, in_loop=False)

        if axis is not None:
            specs = row_specs(rows, axis)
            on_device = on_devices(on_device, (specs, P()), specs)
        return _mark_kept(on_device(rows, absent_beyond(client_ids, num_clients)))

    return _named(READ_CLIENTS, read)


@functools.cache
def _write_clients(placement: str) -> Any:
    """Return `(*rows, client_ids, num_clients, *states) -> rows`."""

    def write(*arguments: Any) -> list[jax.Array]:
        count = len(arguments) // 2 - 1
        rows, states = list(arguments[:count]), list(arguments[count + 2 :])
        axis, num_devices = rows_axis(placement)

        def on_device(rows: list[Any], client_ids: jax.Array, states: Any) -> list[jax.Array]:
            values = [ClientRows(leaf, client_ids) for leaf in rows]
            ring = None if axis is None else RowRing(axis, num_devices)
            return write_clients(values, 0, states, ring, in_loop=False)

        if axis is not None:
            specs = row_specs(rows, axis)
            on_device = on_devices(on_device, (specs, P(), specs), specs)
        client_ids = absent_beyond(*arguments[count : count + 2])
        return on_device(rows, client_ids, _mark_kept(states))

    return _named(WRITE_CLIENTS, write)


def _named(name: str, fn: Any) -> Any:
    """Jit a function under a name by which a loop over the cohort finds it."""
    fn.__name__ = name
    return jax.jit(fn)


def scatter_clients(
    store: ClientStore[State],
    client_ids: ClientIds,
    states: State,
    *,
    placement: str = "clients",
) -> ClientStore[State]:
    """Write the states of a cohort.

    States of absent clients (-1) are ignored. It works inside a `fedpax.program` too.

    Args:
        store: as `client_store` makes it.
        client_ids: as in `gather_clients`, and different from one another.
        states: a pytree with leaves `[cohort, ...]`, the new state of each client.
        placement: the name of the mesh axis.

    Returns:
        The store with these clients' states replaced. Under `jax.jit`, which cannot raise, an index
        that is not below `num_clients` is ignored, and of equal indices any one is written.

    Raises:
        TypeError: `store` is not a `ClientStore`, or states are floats where it has integers.
        ValueError: the mesh axis does not divide the cohort; or, outside of `jax.jit`, an index is
            not below `num_clients`, two indices are equal, or JAX cannot hold a state.

    Example:
        >>> client_ids, states = jnp.array([3, -1, 0]), jnp.array([7.0, 8.0, 9.0])
        >>> store = scatter_clients(client_store(0.0, num_clients=5), client_ids, states)
        >>> store.to_host().tolist()
        [9.0, 0.0, 0.0, 7.0, 0.0]
    """
    client_ids = _check_call("scatter_clients", store, client_ids, placement)
    check_distinct_clients("scatter_clients(): client_ids", client_ids)
    states = checked_tree(states, "scatter_clients(): states")
    _check_states(store, states, np.shape(client_ids)[0])
    leaves, tree = jax.tree.flatten(store.rows)
    write = _write_clients(placement)
    rows = write(*leaves, client_ids, store.num_clients, *jax.tree.leaves(states))
    return ClientStore(jax.tree.unflatten(tree, rows), store.num_clients)


def _mark_kept(states: State) -> State:
    """Mark states as the participants' own, for `fedpax.cost`."""
    return jax.tree.map(lambda x: checkpoint_name(x, KEPT), states)


def _check_states(store: ClientStore[Any], states: Any, size: int) -> None:
    """Raise for states of another structure or shape, or that the dtypes of the store would cut."""
    structure: Any = jax.tree.structure(states)
    expected_structure: Any = jax.tree.structure(store.rows)
    if structure != expected_structure:
        raise ArgumentTypeError(
            f"scatter_clients(): states has the structure {structure}, expected the store's, "
            f"{expected_structure}. Pass what gather_clients returned, with new values."
        )
    leaves = jax.tree.leaves_with_path(states)
    for (path, new), rows in zip(leaves, jax.tree.leaves(store.rows), strict=True):
        dtype, name = jnp.result_type(new), f"states{jax.tree_util.keystr(path)}"
        expected = (size, *rows.shape[1:])
        if np.shape(new) != expected:
            raise ArgumentError(
                f"scatter_clients(): {name} has shape {list(np.shape(new))}, expected "
                f"{list(expected)}, one state for each of client_ids. Stack the states along the "
                "first axis."
            )
        is_cut = any(
            jnp.issubdtype(dtype, broader) and not jnp.issubdtype(rows.dtype, broader)
            for broader in (jnp.inexact, jnp.complexfloating)
        )
        if is_cut:
            raise ArgumentTypeError(
                f"scatter_clients(): {name} has dtype {dtype}, but the store has {rows.dtype}, "
                "expected equal dtypes. Make the store with this dtype: client_store(state, "
                "num_clients) keeps the dtypes of state."
            )


def _check_call(name: str, store: Any, client_ids: ClientIds, placement: str) -> ClientIds:
    """Check the arguments that `gather_clients` and `scatter_clients` share; return the ids."""
    if not isinstance(store, ClientStore):
        raise ArgumentTypeError(
            f"{name}(): store is a {type(store).__name__}, expected a ClientStore. Make it with "
            "client_store(state, num_clients)."
        )
    check_tree_not_deleted(store.rows, f"{name}(): store.rows")
    _, num_devices = rows_axis(placement)
    values = client_ids if hasattr(client_ids, "dtype") else np.asarray(client_ids)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise ArgumentTypeError(
            f"{name}(): client_ids has dtype {values.dtype}, expected integers, each client's "
            "index in the population. Number the clients from 0."
        )
    if np.ndim(values) < 1:
        raise ArgumentError(
            f"{name}(): client_ids is one number, expected integers [cohort]. Pass [client_id]."
        )
    size = np.shape(client_ids)[0]
    if size % num_devices:
        raise ArgumentError(
            f"{name}(): client_ids has {size} entries, which the {num_devices} devices of the mesh "
            f"axis {placement!r} do not divide. Pad it with -1 to {size + -size % num_devices}, or "
            "use a mesh axis that divides it."
        )
    is_concrete = not isinstance(client_ids, jax.core.Tracer)
    if is_concrete and size and getattr(client_ids, "is_fully_addressable", True):
        largest = np.max(np.asarray(client_ids))
        if largest >= store.num_clients:
            raise ArgumentError(
                f"{name}(): client_ids contains {largest}, but the store has {store.num_clients} "
                f"clients (0 to {store.num_clients - 1}). Make it with client_store(state, "
                f"num_clients={largest + 1}) or more."
            )
    if isinstance(client_ids, np.ndarray) and client_ids.dtype.kind == "i":
        client_ids = np.maximum(client_ids, -1)  # -2**32 would be 0 in int32
    return client_ids


def _check_leaf(leaf: Any, path: Any) -> jax.Array:
    """Check that a leaf of a client's state is an array of numbers, and return it as an array."""
    dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
    if not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        raise ArgumentTypeError(
            f"client_store(): state{jax.tree_util.keystr(path)} is of type {type(leaf).__name__} "
            f"and dtype {dtype}, expected an array of numbers. {conversion(leaf)} For random keys, "
            "store an integer and fold it in."
        )
    name = f"client_store(): state{jax.tree_util.keystr(path)}"
    return jnp.asarray(device_array(leaf, name) if isinstance(leaf, np.ndarray) else leaf)
