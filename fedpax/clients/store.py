"""What clients keep between rounds: a row for everyone in the population, spread over the mesh.

A round reads the rows of its cohort and writes them back. On a mesh with an axis of the placement's
name each device holds an equal block of the rows, and takes an equal block of the cohort; what
crosses between devices is the cohort's rows, once each way, however large the population is. The
blocks of the cohort go around the ring of devices, a hop for each device, so that no device ever
holds more of the cohort than two blocks of the size of its own beside it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def client_store(state: Any, population: int, *, placement: str = "clients") -> Any:
    """Gives every client of a population the same state to begin with.

    Args:
        state: a pytree of arrays: what a client keeps, before it has ever taken part.
        population: how many clients there are.
        placement: the name of the mesh axis that the rows are spread over.

    Returns:
        The pytree with leaves `[rows, ...]`. The mesh axis divides `rows`, which is `population`
        or a few more, that nobody uses.

    Raises:
        ValueError: `population` is below 1.
        TypeError: a leaf that is no array of numbers (random keys: keep a number and fold it in).

    Example:
        >>> store = client_store({"corrections": jnp.zeros(3)}, population=5)
        >>> store["corrections"].shape
        (5, 3)
    """
    if population < 1:
        raise ValueError(f"client_store(): population is {population}, expected at least 1.")
    axis, devices = _axis(placement)
    rows = -(-population // devices) * devices

    leaves, tree = jax.tree.flatten_with_path(state)
    arrays = [_check(leaf, path) for path, leaf in leaves]

    def fill(arrays: list[jax.Array]) -> list[jax.Array]:
        return [jnp.broadcast_to(a, (rows // devices, *a.shape)) for a in arrays]

    make = fill if axis is None else _on_devices(fill, axis, (P(),))
    return jax.tree.unflatten(tree, jax.jit(make)(arrays))


def gather_clients(store: Any, clients: jax.Array, *, placement: str = "clients") -> Any:
    """Reads the rows of a cohort.

    Args:
        store: a pytree of arrays `[rows, ...]`, as `client_store` makes it.
        clients: integers `[n]`, who takes part; -1, or any negative number, for a place where
            nobody does. The mesh axis divides n.
        placement: the name of the mesh axis.

    Returns:
        The pytree with leaves `[n, ...]`, placed values; zeros where nobody takes part. Under
        `jax.jit` a number beyond the store's rows reads zeros too, since it cannot be checked.

    Raises:
        ValueError: the mesh axis does not divide n; outside of `jax.jit`, a number beyond the rows.

    Example:
        >>> gather_clients(10 * jnp.arange(5), jnp.array([3, -1, 0])).tolist()
        [30, 0, 0]
    """
    _check_cohort("gather_clients", store, clients, placement)
    return _gather(store, clients, placement)


@functools.partial(jax.jit, static_argnums=2)
def _gather(store: Any, clients: jax.Array, placement: str) -> Any:
    axis, devices = _axis(placement)
    if axis is None:
        return jax.tree.map(lambda rows: _take(rows, clients, 0, 0), store)

    def on_device(store: Any, clients: jax.Array) -> Any:
        here = jax.lax.axis_index(axis)

        def fill(hop: Any, found: Any) -> Any:
            """Adds what is here of the block that is here now and hops on to the next device."""
            block = _block(clients, (here - 1 - hop) % devices, devices)
            return jax.tree.map(
                lambda rows, others: _take(rows, block, here * len(rows), others), store, found
            )

        found = fill(0, jax.tree.map(lambda rows: 0, store))
        return jax.lax.fori_loop(
            1, devices, lambda hop, found: fill(hop, _hop(found, axis, devices)), found
        )

    return _on_devices(on_device, axis, (P(axis), P()))(store, _everywhere(clients))


def scatter_clients(
    store: Any, clients: jax.Array, states: Any, *, placement: str = "clients"
) -> Any:
    """Writes the rows of a cohort.

    Args:
        store: a pytree of arrays `[rows, ...]`.
        clients: integers `[n]`, different from one another; what stands at -1, or any negative
            number, is dropped. The mesh axis divides n.
        states: the pytree with leaves `[n, ...]`, what each of them keeps now.
        placement: the name of the mesh axis.

    Returns:
        The store with these rows. Donate the old one to a `jax.jit` around this, and it is written
        in place. Under `jax.jit` what stands at a number beyond the store's rows is dropped too.

    Raises:
        ValueError: the mesh axis does not divide n; outside of `jax.jit`, a number beyond the rows.

    Example:
        >>> clients, states = jnp.array([3, -1, 0]), jnp.array([7.0, 8.0, 9.0])
        >>> scatter_clients(jnp.zeros(5), clients, states).tolist()
        [9.0, 0.0, 0.0, 7.0, 0.0]
    """
    _check_cohort("scatter_clients", store, clients, placement)
    return _scatter(store, clients, states, placement)


@functools.partial(jax.jit, static_argnums=3)
def _scatter(store: Any, clients: jax.Array, states: Any, placement: str) -> Any:
    axis, devices = _axis(placement)
    if axis is None:
        return jax.tree.map(lambda rows, new: _put(rows, clients, new, 0), store, states)

    def on_device(store: Any, clients: jax.Array, states: Any) -> Any:
        here = jax.lax.axis_index(axis)

        def write(hop: Any, store: Any, states: Any) -> Any:
            """Writes what belongs here of the block that is here now."""
            block = _block(clients, (here - hop) % devices, devices)
            return jax.tree.map(
                lambda rows, new: _put(rows, block, new, here * len(rows)), store, states
            )

        def body(hop: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            states = _hop(carry[1], axis, devices)
            return write(hop, carry[0], states), states

        return jax.lax.fori_loop(1, devices, body, (write(0, store, states), states))[0]

    in_specs = (P(axis), P(), P(axis))
    return _on_devices(on_device, axis, in_specs)(store, _everywhere(clients), states)


def _take(rows: jax.Array, clients: jax.Array, start: Any, others: Any) -> jax.Array:
    """The rows of those clients whose rows these are, which begin at `start`; else `others`."""
    place, mine = _place(rows, clients, start)
    found = rows[jnp.where(mine, place, 0)]
    others = jnp.asarray(others, rows.dtype)
    return jnp.where(mine.reshape(-1, *[1] * (rows.ndim - 1)), found, others)


def _put(rows: jax.Array, clients: jax.Array, new: jax.Array, start: Any) -> jax.Array:
    place, mine = _place(rows, clients, start)
    return rows.at[jnp.where(mine, place, len(rows))].set(new, mode="drop")


def _block(clients: jax.Array, number: Any, devices: int) -> jax.Array:
    size = len(clients) // devices
    return jax.lax.dynamic_slice_in_dim(clients, number * size, size)


def _hop(states: Any, axis: str, devices: int) -> Any:
    """What the device before this one has."""
    ring = [(d, (d + 1) % devices) for d in range(devices)]
    return jax.tree.map(lambda state: jax.lax.ppermute(state, axis, ring), states)


def _place(rows: jax.Array, clients: jax.Array, start: Any) -> tuple[jax.Array, jax.Array]:
    place = clients - start
    return place, (clients >= 0) & (place >= 0) & (place < len(rows))


def _axis(placement: str) -> tuple[str | None, int]:
    """The mesh axis that rows are spread over, if there is one, and its size."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if types.get(placement, AxisType.Manual) == AxisType.Manual:
        return None, 1
    return placement, mesh.shape[placement]


def _check_cohort(name: str, store: Any, clients: jax.Array, placement: str) -> None:
    _, devices = _axis(placement)
    size = np.shape(clients)[0]
    if size % devices:
        raise ValueError(
            f"{name}(): a cohort of {size} clients cannot be shared by the {devices} devices of "
            f"the mesh axis {placement!r} in equal blocks: fill it up with -1 to "
            f"{size + -size % devices}, or take a mesh axis that divides it."
        )
    known = not isinstance(clients, jax.core.Tracer)
    if known and size and getattr(clients, "is_fully_addressable", True):
        largest = np.max(np.asarray(clients))
        if (rows := min(map(len, jax.tree.leaves(store)), default=largest + 1)) <= largest:
            raise ValueError(
                f"{name}(): client {largest} has no row in a store of {rows} rows: make it by "
                f"client_store with a population of at least {largest + 1}."
            )


def _everywhere(clients: jax.Array) -> jax.Array:
    """The cohort's numbers, whole on every device."""
    spec = jax.typeof(clients).sharding.spec
    return clients if all(entry is None for entry in spec) else jax.sharding.reshard(clients, P())


def _on_devices(fn: Any, axis: str, in_specs: Any) -> Any:
    return jax.shard_map(
        fn, axis_names={axis}, in_specs=in_specs, out_specs=P(axis), check_vma=False
    )


def _check(leaf: Any, path: Any) -> jax.Array:
    dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
    if not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        raise TypeError(
            f"client_store(): state{jax.tree_util.keystr(path)} is of type {type(leaf).__name__} "
            f"and dtype {dtype}, expected an array of numbers. Of random keys, keep a number and "
            "fold it in."
        )
    return jnp.asarray(leaf)
