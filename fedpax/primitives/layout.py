"""Shardings and types of placed values, with and without the placement's axis."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from fedpax.errors import ArgumentError
from fedpax.primitives._jax import JaxprEqn
from fedpax.primitives.placement import Placement


def mesh_axis(placement: Placement) -> str | None:
    """Return the mesh axis that shards a placement's participants, or None."""
    # If the axis is manual, the code runs on one shard.
    return None if _axis_type(placement) in (None, AxisType.Manual) else placement.name


def explicit_axis(placement: Placement) -> str | None:
    """Return the placement's mesh axis if it is explicit; only then do array types contain it."""
    return placement.name if _axis_type(placement) == AxisType.Explicit else None


def _axis_type(placement: Placement) -> AxisType | None:
    mesh = jax.sharding.get_abstract_mesh()
    axis_type = dict(zip(mesh.axis_names, mesh.axis_types, strict=True)).get(placement.name)
    # An automatic axis of size 1 shards nothing: the program equals the one for a mesh without the
    # axis.
    return None if axis_type == AxisType.Auto and mesh.shape[placement.name] == 1 else axis_type


def spans_devices() -> bool:
    """Tell whether arrays can have shards on several devices: not where all axes are manual."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(axis_type != AxisType.Manual and size > 1 for axis_type, size in axes)


def find_mesh(avals: Iterable[Any]) -> AbstractMesh:
    """Return the mesh in context or, if none is set, the mesh of the first explicit argument."""
    mesh = jax.sharding.get_abstract_mesh()
    others = (aval.sharding.mesh for aval in avals)
    return next((m for m in (mesh, *others) if not m.empty), mesh)


def describe_axis(placement: str, mesh: AbstractMesh) -> str:
    """Describe the axis of a mesh that has a placement's name; empty without a mesh."""
    if mesh.empty:
        return ""
    if placement in mesh.axis_names:
        return f"on the mesh axis {placement!r} of size {mesh.shape[placement]}"
    return f"not on the mesh, whose axes are {', '.join(mesh.axis_names)}"


def check_placement_divisible(placement: Placement) -> None:
    """Raise a ValueError if the placement's mesh axis does not divide its size."""
    axis = mesh_axis(placement)
    if axis is None:
        return
    devices = jax.sharding.get_abstract_mesh().shape[axis]
    if placement.size % devices:
        below, above = placement.size // devices * devices, -(-placement.size // devices) * devices
        raise ArgumentError(
            f"The mesh axis {axis!r} of size {devices} does not divide the placement {placement}. "
            f"Use {f'{below} or ' if below else ''}{above} participants, or a mesh whose {axis!r} "
            f"axis has a size that divides {placement.size}."
        )


def placed_aval(aval: Any, placement: Placement) -> Any:
    """Return the type of a placed value, given the type of one participant's value."""
    mesh = jax.sharding.get_abstract_mesh()
    sharding = aval.sharding.update(mesh=mesh, spec=placed_spec(aval, placement))
    return aval.update(shape=(placement.size, *aval.shape), sharding=sharding)


def placed_spec(aval: Any, placement: Placement) -> P:
    """Return the partition spec of a placed value, given the type of one participant's value."""
    # A mesh axis can shard only one dimension: the placement's is removed from the others.
    axis = explicit_axis(placement)
    return P(axis, *(_without_axis(entry, axis) for entry in aval.sharding.spec))


def unplaced_aval(aval: Any) -> Any:
    """Return the type of one participant's slice of a placed value."""
    sharding = aval.sharding.update(spec=P(*aval.sharding.spec[1:]))
    return aval.update(shape=aval.shape[1:], sharding=sharding)


def shard_over_placement(x: jax.Array, placement: Placement) -> jax.Array:
    """Shard the leading axis over the placement's mesh axis, if that axis is explicit."""
    wanted = placed_spec(unplaced_aval(jax.typeof(x)), placement)
    return x if jax.typeof(x).sharding.spec == wanted else jax.sharding.reshard(x, wanted)


def replicate_over_placement(x: jax.Array, placement: Placement) -> jax.Array:
    """Gather a server value over the placement's mesh axis, if that axis is explicit."""
    wanted = P(*placed_spec(jax.typeof(x), placement)[1:])
    return x if jax.typeof(x).sharding.spec == wanted else jax.sharding.reshard(x, wanted)


def has_own_shardings(eqn: JaxprEqn) -> bool:
    """Return whether a `jax.jit` was given shardings of its arguments or results."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(isinstance(s, jax.sharding.Sharding) for s in shardings)


def move_to_mesh(x: jax.Array, mesh: AbstractMesh) -> jax.Array:
    """Change the mesh in an array's type to one with other axis types."""
    # Dimensions that were sharded over automatic axes are replicated over explicit ones.
    sharding = jax.typeof(x).sharding
    if mesh.empty or sharding.mesh.empty or sharding.mesh == mesh:
        return x
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    spec = sharding.spec
    for axis in sharding.mesh.axis_names:
        if types.get(axis) != AxisType.Explicit:
            spec = P(*(_without_axis(entry, axis) for entry in spec))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.sharding.reshard(x, spec)


def _without_axis(entry: Any, axis: str | None) -> Any:
    """Remove a mesh axis from one entry of a partition spec."""
    if axis is None:
        return entry
    if not isinstance(entry, tuple):
        return None if entry == axis else entry
    rest = tuple(e for e in entry if e != axis)
    return rest if len(rest) > 1 else (rest[0] if rest else None)
