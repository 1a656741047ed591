"""How placed values lie on a mesh: the types of values with and without a placement's axis."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from fedpax.primitives.placement import Placement


def mesh_axis(placement: Placement) -> str | None:
    """The mesh axis that the participants are laid out over.

    Returns:
        The placement's name, or None where the mesh has no such axis, or has it but manual: then
        the code at hand runs on one shard of it already.
    """
    return None if _axis_type(placement) in (None, AxisType.Manual) else placement.name


def explicit_axis(placement: Placement) -> str | None:
    """The placement's mesh axis if its type is explicit: only then do types name it."""
    return placement.name if _axis_type(placement) == AxisType.Explicit else None


def _axis_type(placement: Placement) -> AxisType | None:
    mesh = jax.sharding.get_abstract_mesh()
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True)).get(placement.name)


def find_mesh(avals: Any) -> AbstractMesh:
    """The mesh in context or, where none is set, the one that explicit arguments lie on."""
    mesh = jax.sharding.get_abstract_mesh()
    others = (aval.sharding.mesh for aval in avals)
    return next((m for m in (mesh, *others) if not m.empty), mesh)


def check_divisible(placement: Placement) -> None:
    """Raises a ValueError where the mesh axis of the placement does not divide its size."""
    axis = mesh_axis(placement)
    if axis is None:
        return
    devices = jax.sharding.get_abstract_mesh().shape[axis]
    if placement.size % devices:
        below, above = placement.size // devices * devices, -(-placement.size // devices) * devices
        raise ValueError(
            f"The mesh axis {axis!r} of size {devices} does not divide the placement {placement}. "
            f"Use {f'{below} or ' if below else ''}{above} participants, or a mesh whose {axis!r} "
            f"axis has a size that divides {placement.size}."
        )


def placed_aval(aval: Any, placement: Placement) -> Any:
    """The type of a value of which every participant has one: the placement's axis in front."""
    mesh = jax.sharding.get_abstract_mesh()
    sharding = aval.sharding.update(mesh=mesh, spec=placed_spec(aval, placement))
    return aval.update(shape=(placement.size, *aval.shape), sharding=sharding)


def placed_spec(aval: Any, placement: Placement) -> P:
    """The layout that follows: a mesh axis shards one dimension only, so the others give it up."""
    axis = explicit_axis(placement)
    return P(axis, *(_without(entry, axis) for entry in aval.sharding.spec))


def unplaced_aval(aval: Any) -> Any:
    """The type of one participant's slice of a placed value."""
    sharding = aval.sharding.update(spec=P(*aval.sharding.spec[1:]))
    return aval.update(shape=aval.shape[1:], sharding=sharding)


def shard_over_placement(x: jax.Array, placement: Placement) -> jax.Array:
    """Moves the leading axis to the placement's mesh axis, where the types would name it."""
    wanted = placed_spec(unplaced_aval(jax.typeof(x)), placement)
    return x if jax.typeof(x).sharding.spec == wanted else jax.sharding.reshard(x, wanted)


def replicate_over_placement(x: jax.Array, placement: Placement) -> jax.Array:
    """Gathers a server value over the placement's mesh axis, where its type names that axis."""
    wanted = P(*placed_spec(jax.typeof(x), placement)[1:])
    return x if jax.typeof(x).sharding.spec == wanted else jax.sharding.reshard(x, wanted)


def _without(entry: Any, axis: str | None) -> Any:
    """A dimension's mesh axes less one."""
    if axis is None:
        return entry
    if not isinstance(entry, tuple):
        return None if entry == axis else entry
    rest = tuple(e for e in entry if e != axis)
    return rest if len(rest) > 1 else (rest[0] if rest else None)
