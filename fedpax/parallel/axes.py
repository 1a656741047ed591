"""Model axes: the axes of parameters and activations by meaning, and one table that shards them.

A model names the axes of its arrays for what they are, ("embed", "mlp"), and knows no mesh. The
table RULES says which axes of the mesh shard each of them. A mesh without those axes leaves the
array whole, so one model runs on one device, sharded, and inside federated programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Rules: TypeAlias = Mapping[str, str | tuple[str, ...] | None]

# Parameters: fsdp cuts their embed axis, tensor their inner one, expert the experts of a mixture,
# stage the layers. Activations: data, fsdp, expert and stage cut the batch (outside of a pipeline's
# stages), sequence the tokens. None: whole on every device.
RULES: Rules = MappingProxyType(
    {
        "batch": ("data", "fsdp", "expert", "stage"),
        "sequence": "sequence",
        "vocab": "tensor",
        "embed": "fsdp",
        "heads": "tensor",
        "kv_heads": "tensor",
        "head_dim": None,
        "mlp": "tensor",
        "experts": "expert",
        "repeats": None,
        "layers": "stage",
        "norm": None,
    }
)


def partition_spec(
    logical: Sequence[str | None],
    mesh: Mesh | AbstractMesh | None = None,
    rules: Rules = RULES,
    *,
    shape: Sequence[int] | None = None,
) -> PartitionSpec:
    """Looks up which axes of the mesh shard an array whose axes are named by meaning.

    An axis of the mesh is left out where the mesh does not have it, where it is manual (inside
    `jax.shard_map`, where each device holds its own part), where an earlier axis of the array
    uses it, and, if `shape` is given, where it does not divide the array's axis.

    Args:
      logical: a name for each axis of the array, None for an axis that is never sharded.
      mesh: the mesh, by default the one that `jax.set_mesh` set; none at all shards nothing.
      rules: the axes of the mesh, one or several, for each name.
      shape: the array's shape.

    Returns:
      A `PartitionSpec` with one entry for each axis of the array.

    Raises:
      ValueError: a name has no rule, or `shape` has another number of axes than `logical`.

    Example:
      >>> from jax.sharding import AbstractMesh
      >>> mesh = AbstractMesh((2, 4), ("fsdp", "tensor"))
      >>> tuple(partition_spec(("batch", "embed", "mlp"), mesh))
      ('fsdp', None, 'tensor')
      >>> tuple(partition_spec(("embed", "heads"), mesh, shape=(128, 6)))
      ('fsdp', None)
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if shape is not None and len(shape) != len(logical):
        raise ValueError(
            f"logical={tuple(logical)} names {len(logical)} axes, but the array has shape "
            f"{tuple(shape)}: give one name, or None, for each axis."
        )
    free = _axes_of_type(mesh, AxisType.Explicit) | _axes_of_type(mesh, AxisType.Auto)
    entries: list[str | tuple[str, ...] | None] = []
    for position, name in enumerate(logical):
        chosen: list[str] = []
        for axis in (axis for axis in _axes_of(name, rules) if axis in free):
            parts = math.prod(mesh.shape[a] for a in (*chosen, axis))
            if shape is None or shape[position] % parts == 0:
                chosen.append(axis)
        free -= set(chosen)
        entries.append(tuple(chosen) if len(chosen) > 1 else chosen[0] if chosen else None)
    return PartitionSpec(*entries)


def constrain(x: jax.Array, logical: Sequence[str | None], rules: Rules = RULES) -> jax.Array:
    """Tells the compiler how to shard a value inside a program, by the names of its axes.

    On automatic axes of the mesh it is `jax.lax.with_sharding_constraint`, on explicit axes
    `jax.sharding.reshard`. It does nothing without a mesh, and on one none of whose axes the
    rules name. Under `vmap` the mapped axis keeps the sharding that it has, or takes
    `spmd_axis_name`.

    Args:
      x: an array of any shape.
      logical: a name for each of its axes, None for an axis that is not sharded.
      rules: the axes of the mesh, one or several, for each name.

    Returns:
      `x`, the values unchanged.

    Raises:
      ValueError: a name has no rule, or `x` has another number of axes than `logical`.

    Example:
      >>> import jax.numpy as jnp
      >>> constrain(jnp.arange(3.0), ("batch",))  # no mesh is set
      Array([0., 1., 2.], dtype=float32)
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = _axes_of_type(mesh, AxisType.Explicit)
    free = explicit | _axes_of_type(mesh, AxisType.Auto)
    ruled = {axis for name in rules for axis in _axes_of(name, rules)} & free
    # Explicit axes that no rule names, such as a placement's, stay where they are.
    kept = _only(jax.typeof(x).sharding.spec, explicit - ruled)
    parts = [math.prod(mesh.shape[axis] for axis in axes) for axes in kept]
    shape = [size // part for size, part in zip(x.shape, parts, strict=True)]
    spec = partition_spec(logical, mesh, rules, shape=shape)
    if ruled & explicit:
        pairs = zip(kept, _only(spec, explicit), strict=True)
        x = jax.sharding.reshard(x, PartitionSpec(*(old + new or None for old, new in pairs)))
    if ruled - explicit:
        entries = _only(spec, ruled - explicit)
        x = jax.lax.with_sharding_constraint(x, PartitionSpec(*(e or None for e in entries)))
    return x


def explicit_spec(
    logical: Sequence[str | None], shape: Sequence[int], rules: Rules = RULES
) -> PartitionSpec | None:
    """Says how the explicit axes of the mesh shard a result, where JAX cannot tell by itself.

    It is what `out_sharding=` of `jnp.einsum` and of `x.at[i].get` takes when they contract or
    index a sharded axis. Automatic axes need none of it.

    Args:
      logical: a name for each axis of the result, None for an axis that is not sharded.
      shape: the result's shape.
      rules: the axes of the mesh, one or several, for each name.

    Returns:
      The `PartitionSpec` over explicit axes, or None on a mesh that has none.

    Raises:
      ValueError: a name has no rule, or the shape has another number of axes than `logical`.

    Example:
      >>> explicit_spec(("batch", None), (8, 16)) is None  # no mesh is set
      True
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = _axes_of_type(mesh, AxisType.Explicit)
    spec = partition_spec(logical, mesh, rules, shape=shape)
    return PartitionSpec(*(e or None for e in _only(spec, explicit))) if explicit else None


def shardings(logical_tree: Any, shapes_tree: Any, mesh: Mesh, rules: Rules = RULES) -> Any:
    """Says where each parameter lives: a tree of shardings, for `jax.jit(init, out_shardings=...)`.

    Args:
      logical_tree: the structure of `shapes_tree`, with a tuple of names for each array.
      shapes_tree: arrays, or what `jax.eval_shape` returns.
      mesh: the mesh.
      rules: the axes of the mesh, one or several, for each name.

    Returns:
      The same structure with a `jax.sharding.NamedSharding` for each array. An axis of the mesh
      that does not divide an array's axis does not shard it.

    Raises:
      ValueError: the trees have different structures, or see `partition_spec`.

    Example:
      >>> mesh = jax.make_mesh((1,), ("fsdp",))
      >>> shapes = {"weight": jax.ShapeDtypeStruct((8, 4), "float32")}
      >>> tuple(shardings({"weight": ("embed", "mlp")}, shapes, mesh)["weight"].spec)
      ('fsdp', None)
    """
    # The arrays' structure comes first, so that the tuples of names below it count as leaves.
    return jax.tree.map(
        lambda array, names: NamedSharding(
            mesh, partition_spec(names, mesh, rules, shape=array.shape)
        ),
        shapes_tree,
        logical_tree,
    )


def _axes_of(name: str | None, rules: Rules) -> tuple[str, ...]:
    if name is None:
        return ()
    if name not in rules:
        raise ValueError(
            f"logical names an axis {name!r}, which the rules do not know: use one of "
            f"{', '.join(rules)}, or pass rules={{**RULES, {name!r}: an axis of the mesh or None}}."
        )
    axes = rules[name]
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _axes_of_type(mesh: Mesh | AbstractMesh, kind: AxisType) -> set[str]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, other in types if other is kind}


def _only(spec: PartitionSpec, axes: set[str]) -> list[tuple[str, ...]]:
    """For each axis of the array, which of these axes of the mesh shard it."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return [tuple(axis for axis in entry if axis in axes) for entry in entries]
