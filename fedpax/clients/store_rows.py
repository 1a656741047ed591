"""The rows of a client store on the devices of a mesh."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Int, Int64

ROW_MULTIPLE = 8
"""The number of rows is a multiple of this, so that 1, 2, 4 and 8 devices have the same shapes."""


def count_rows(num_clients: int, num_devices: int) -> int:
    """Return the number of rows of a store, padding included."""
    multiple = math.lcm(ROW_MULTIPLE, num_devices)
    return -(-num_clients // multiple) * multiple


def home_devices(
    client_ids: Int[np.ndarray, " cohort"], num_clients: int, num_devices: int
) -> Int64[np.ndarray, " cohort"]:
    """Return the device that has each client's row of a `ClientStore`.

    A cohort in the order `fedpax.data.balanced_order(num_steps, num_devices, homes=...)` moves few
    rows between devices; `fedpax.data.cohort_rounds` uses this order.

    Args:
        client_ids: integers `[cohort]`, as in `gather_clients`; negative where a client is absent.
        num_clients: the size of the population.
        num_devices: the size of the mesh axis of the placement.

    Returns:
        int64 `[cohort]`: the index along this mesh axis; -1 where a client is absent.

    Example:
        >>> home_devices(np.array([0, 11, -1, 12]), num_clients=24, num_devices=2).tolist()
        [0, 0, -1, 1]
    """
    ids = np.asarray(client_ids, np.int64)
    block = count_rows(num_clients, num_devices) // num_devices
    return np.where(ids < 0, -1, ids // block)


def rows_axis(placement: str) -> tuple[str | None, int]:
    """Return the mesh axis that shards the rows, or None if there is none, and its size."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axis_type = types.get(placement, AxisType.Manual)
    # An automatic axis of size 1 shards nothing.
    if axis_type == AxisType.Manual or (axis_type == AxisType.Auto and mesh.shape[placement] == 1):
        return None, 1
    return placement, mesh.shape[placement]


def state_spec(state: jax.Array, axis: str) -> P:
    """Return the explicit axes that shard one client's state, other than the placement's."""
    return P(*(tuple(n for n in _names(e) if n != axis) or None for e in _spec(state)))


def row_specs(rows: Any, axis: str) -> Any:
    """Return the specs of rows, and of a cohort's states beside them."""
    return jax.tree.map(lambda x: P(axis, *_spec(x)[1:]), rows)


def on_devices(fn: Any, in_specs: Any, out_specs: Any) -> Any:
    """Map `fn` over the devices of all mesh axes that the specs name."""
    # Explicit axes of a state's own dimensions are among them: a map over the placement's axis
    # alone gathers its arguments and results over each explicit axis.
    specs = jax.tree.leaves((in_specs, out_specs))
    names = {name for spec in specs for entry in spec for name in _names(entry)}
    mapped = jax.shard_map(
        fn, axis_names=names, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return lambda *arguments: mapped(*jax.tree.map(_reshard, arguments, in_specs))


def _reshard(x: jax.Array, spec: P) -> jax.Array:
    """Shard an array over the explicit axes of a spec."""
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    entries = [tuple(n for n in _names(entry) if n in explicit) or None for entry in spec]
    wanted = [*entries, *[None] * (x.ndim - len(entries))]
    is_there = [_names(entry) for entry in _spec(x)] == [_names(entry) for entry in wanted]
    return x if is_there else jax.sharding.reshard(x, P(*wanted))


def _spec(x: jax.Array) -> P:
    return jax.typeof(x).sharding.spec


def _names(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
