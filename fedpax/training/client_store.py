"""What clients keep between rounds: a row for everyone in the population, spread over the mesh.

A round reads the rows of its cohort and writes them back. On a mesh with an axis of the placement's
name each device holds an equal block of the rows; what crosses between devices is the cohort's
rows, once each way, however large the population is.
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


@functools.partial(jax.jit, static_argnames="placement")
def gather_clients(store: Any, clients: jax.Array, *, placement: str = "clients") -> Any:
    """Reads the rows of a cohort.

    Args:
        store: a pytree of arrays `[rows, ...]`, as `client_store` makes it.
        clients: integers `[n]`, who takes part; -1 for a place where nobody does.
        placement: the name of the mesh axis.

    Returns:
        The pytree with leaves `[n, ...]`, placed values; zeros where nobody takes part.

    Example:
        >>> gather_clients(10 * jnp.arange(5), jnp.array([3, -1, 0])).tolist()
        [30, 0, 0]
    """
    axis, _ = _axis(placement)
    if axis is None:
        return jax.tree.map(lambda rows: _take(rows, clients, 0), store)

    def on_device(store: Any, clients: jax.Array) -> Any:
        def own(rows: jax.Array) -> jax.Array:
            found = _take(rows, clients, jax.lax.axis_index(axis) * len(rows))
            return _to_owners(found, axis)

        return jax.tree.map(own, store)

    return _on_devices(on_device, axis, (P(axis), P()))(store, _everywhere(clients))


@functools.partial(jax.jit, static_argnames="placement")
def scatter_clients(
    store: Any, clients: jax.Array, states: Any, *, placement: str = "clients"
) -> Any:
    """Writes the rows of a cohort.

    Args:
        store: a pytree of arrays `[rows, ...]`.
        clients: integers `[n]`, different from one another; what stands at -1 is dropped.
        states: the pytree with leaves `[n, ...]`, what each of them keeps now.
        placement: the name of the mesh axis.

    Returns:
        The store with these rows. Donate the old one, and it is written in place.

    Example:
        >>> clients, states = jnp.array([3, -1, 0]), jnp.array([7.0, 8.0, 9.0])
        >>> scatter_clients(jnp.zeros(5), clients, states).tolist()
        [9.0, 0.0, 0.0, 7.0, 0.0]
    """
    axis, _ = _axis(placement)
    if axis is None:
        return jax.tree.map(lambda rows, new: _put(rows, clients, new, 0), store, states)

    def on_device(store: Any, clients: jax.Array, states: Any) -> Any:
        def own(rows: jax.Array, new: jax.Array) -> jax.Array:
            everyones = jax.lax.all_gather(new, axis, tiled=True)
            return _put(rows, clients, everyones, jax.lax.axis_index(axis) * len(rows))

        return jax.tree.map(own, store, states)

    in_specs = (P(axis), P(), P(axis))
    return _on_devices(on_device, axis, in_specs)(store, _everywhere(clients), states)


def _take(rows: jax.Array, clients: jax.Array, start: Any) -> jax.Array:
    """The rows of those clients whose rows these are, which begin at `start`; zeros for others."""
    place, mine = _place(rows, clients, start)
    found = rows[jnp.where(mine, place, 0)]
    return jnp.where(mine.reshape(-1, *[1] * (rows.ndim - 1)), found, jnp.zeros((), rows.dtype))


def _put(rows: jax.Array, clients: jax.Array, new: jax.Array, start: Any) -> jax.Array:
    place, mine = _place(rows, clients, start)
    return rows.at[jnp.where(mine, place, len(rows))].set(new, mode="drop")


def _to_owners(found: jax.Array, axis: str) -> jax.Array:
    """Each device's block of the cohort, of whose rows one device has each and the others zeros.

    What a reduce-scatter does, which in JAX 0.11.2 fails beside explicit axes and ends XLA's CPU
    compiler for bfloat16.
    """
    parts = jax.lax.all_to_all(found, axis, 0, 0, tiled=True)
    parts = parts.reshape(jax.lax.axis_size(axis), -1, *found.shape[1:])
    return jnp.any(parts, 0) if found.dtype == jnp.bool_ else jnp.sum(parts, 0, found.dtype)


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
