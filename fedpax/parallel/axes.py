"""Logical axes of parameters and activations, and the table of rules that shards them.

RULES maps a logical axis, such as "embed", to mesh axes. Those that a mesh does not have are
ignored, so a model runs on one device, sharded, and inside federated programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import chex
import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from fedpax.errors import ArgumentError

ShardingTree: TypeAlias = NamedSharding | Iterable["ShardingTree"] | Mapping[Any, "ShardingTree"]
"""A pytree whose leaves are `NamedSharding`s."""

Rules: TypeAlias = Mapping[str, str | tuple[str, ...] | None]

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
"""The mesh axes of each logical axis.

Parameters: fsdp shards the embed axis, tensor the inner axes, expert the experts of a mixture,
stage the layers. Activations: data, fsdp, expert and stage shard the batch (stage only outside
of a pipeline), sequence the tokens. None: replicated.
"""


def partition_spec(
    logical: Sequence[str | None],
    mesh: Mesh | AbstractMesh | None = None,
    rules: Rules = RULES,
    *,
    shape: Sequence[int] | None = None,
) -> PartitionSpec:
    """Look up the mesh axes that shard an array with logical axes.

    A mesh axis of the rules is skipped

    - if the mesh does not have it, or has it automatic and of size 1;
    - if it is manual (inside a `jax.shard_map` over it, where each device holds its own shard);
    - if an earlier axis of the array uses it;
    - if it does not divide the array's axis, where `shape` is given.

    Args:
        logical: the logical axis of each array axis; None for an axis that is never sharded.
        mesh: the mesh. Default None: the mesh of `jax.set_mesh`; without one, nothing is sharded.
        rules: the mesh axis or axes of each logical axis. Default: RULES.
        shape: shape of the array. Default None: do not check whether mesh axes divide it.

    Returns:
        A `PartitionSpec` with one entry for each axis of the array.

    Raises:
        ValueError: if a name has no rule, or `shape` has another number of axes than `logical`.

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
        raise ArgumentError(
            f"logical={tuple(logical)} names {len(logical)} axes, but the array has shape "
            f"{tuple(shape)}: pass one name, or None, for each axis."
        )
    # An automatic axis of size 1 shards nothing; explicit ones are part of the types of arrays.
    automatic = {axis for axis in _axes_of_type(mesh, AxisType.Auto) if mesh.shape[axis] > 1}
    free = _axes_of_type(mesh, AxisType.Explicit) | automatic
    entries: list[str | tuple[str, ...] | None] = []
    for position, name in enumerate(logical):
        chosen: list[str] = []
        for axis in (axis for axis in _mesh_axes(name, rules) if axis in free):
            shards = math.prod(mesh.shape[a] for a in (*chosen, axis))
            if shape is None or shape[position] % shards == 0:
                chosen.append(axis)
        free -= set(chosen)
        entries.append(tuple(chosen) if len(chosen) > 1 else chosen[0] if chosen else None)
    return PartitionSpec(*entries)


def constrain(x: jax.Array, logical: Sequence[str | None], rules: Rules = RULES) -> jax.Array:
    """Shard a value inside a program by its logical axes.

    It is `jax.lax.with_sharding_constraint` on automatic mesh axes, `jax.sharding.reshard` on
    explicit ones, and nothing without the rules' axes. Under `vmap`, the mapped axis keeps its
    sharding, or gets `spmd_axis_name`.

    Args:
        x: an array of any shape.
        logical: the logical axis of each array axis; None for an axis that is not sharded.
        rules: the mesh axis or axes of each logical axis.

    Raises:
        ValueError: if a name has no rule, or `x` has another number of axes than `logical`.

    Example:
        >>> import jax.numpy as jnp
        >>> constrain(jnp.arange(3.0), ("batch",))  # no mesh is set
        Array([0., 1., 2.], dtype=float32)
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = _axes_of_type(mesh, AxisType.Explicit)
    free = explicit | _axes_of_type(mesh, AxisType.Auto)
    ruled = {axis for name in rules for axis in _mesh_axes(name, rules)} & free
    # Explicit axes without a rule, such as a placement's, keep their place in the sharding.
    kept = _only(jax.typeof(x).sharding.spec, explicit - ruled)
    shards = [math.prod(mesh.shape[axis] for axis in axes) for axes in kept]
    shape = [size // count for size, count in zip(x.shape, shards, strict=True)]
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
    """Return the spec of a result over explicit mesh axes, where JAX cannot infer it.

    It is the `out_sharding=` of `jnp.einsum` and `x.at[i].get` over a sharded axis.

    Args:
        logical: the logical axis of each axis of the result; None for an axis that is not sharded.
        shape: shape of the result.
        rules: the mesh axis or axes of each logical axis.

    Returns:
        The `PartitionSpec` over explicit axes; None on a mesh without explicit axes.

    Raises:
        ValueError: if a name has no rule, or the shape has another number of axes than `logical`.

    Example:
        >>> explicit_spec(("batch", None), (8, 16)) is None  # no mesh is set
        True
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = _axes_of_type(mesh, AxisType.Explicit)
    spec = partition_spec(logical, mesh, rules, shape=shape)
    return PartitionSpec(*(e or None for e in _only(spec, explicit))) if explicit else None


def shardings(
    logical_tree: Any, shapes_tree: chex.ArrayTree, mesh: Mesh, rules: Rules = RULES
) -> Any:
    """Return the sharding of each parameter, such as for `jax.jit(init, out_shardings=...)`.

    Args:
        logical_tree: the structure of `shapes_tree`, with a tuple of logical axes for each array.
            None: each array is replicated.
        shapes_tree: arrays, or the result of `jax.eval_shape`.
        mesh: the mesh.
        rules: the mesh axis or axes of each logical axis.

    Returns:
        The same structure with a `jax.sharding.NamedSharding` for each array. A mesh axis that does
        not divide an array's axis does not shard it.

    Raises:
        ValueError: if the trees have different structures; see also `partition_spec`.

    Example:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), (AxisType.Explicit,))
        >>> shapes = {"weight": jax.ShapeDtypeStruct((8, 4), "float32")}
        >>> tuple(shardings({"weight": ("embed", "mlp")}, shapes, mesh)["weight"].spec)
        ('fsdp', None)
    """
    if logical_tree is None:
        return jax.tree.map(lambda array: NamedSharding(mesh, PartitionSpec()), shapes_tree)
    # The tree of shapes comes first, so that the tuples of names count as leaves.
    return jax.tree.map(
        lambda array, names: NamedSharding(
            mesh, partition_spec(names, mesh, rules, shape=array.shape)
        ),
        shapes_tree,
        logical_tree,
    )


def _mesh_axes(name: str | None, rules: Rules) -> tuple[str, ...]:
    if name is None:
        return ()
    if name not in rules:
        raise ArgumentError(
            f"The logical axis {name!r} has no rule: use one of "
            f"{', '.join(rules)}, or pass rules={{**RULES, {name!r}: a mesh axis or None}}."
        )
    return entry_axes(rules[name])


def entry_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a `PartitionSpec`, or of `RULES`."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _axes_of_type(mesh: Mesh | AbstractMesh, axis_type: AxisType) -> set[str]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, other in types if other is axis_type}


def _only(spec: PartitionSpec, axes: set[str]) -> list[tuple[str, ...]]:
    """Return, for each axis of the array, the mesh axes of the spec that are in `axes`."""
    return [tuple(axis for axis in entry_axes(entry) if axis in axes) for entry in spec]


def check_divisible(name: str, shapes: chex.ArrayTree, shardings: ShardingTree) -> None:
    """Raise a ValueError if a mesh axis does not divide the array axis that it shards."""
    # JAX's own errors name neither the array nor the mesh axis. `name` is the tree's in the
    # message, such as "params". `shardings` may be a prefix of `shapes`; only instances of
    # NamedSharding are checked.

    def check(prefix: tuple, sharding: Sharding, below: chex.ArrayTree) -> None:
        if not isinstance(sharding, NamedSharding):
            return
        for path, leaf in jax.tree.leaves_with_path(below):
            _check_array(f"{name}{jax.tree_util.keystr((*prefix, *path))}", leaf.shape, sharding)

    jax.tree.map_with_path(check, shardings, shapes, is_leaf=lambda x: isinstance(x, Sharding))


def _check_array(name: str, shape: tuple[int, ...], sharding: NamedSharding) -> None:
    spec = sharding.spec
    if len(spec) > len(shape):
        raise ArgumentError(
            f"The sharding {spec} has {len(spec)} entries, but {name} has shape {tuple(shape)}: "
            f"pass at most {len(shape)}, one for each axis of the array."
        )
    for index, (size, entry) in enumerate(zip(shape, spec, strict=False)):
        axes = (entry,) if isinstance(entry, str) else entry
        if not isinstance(axes, tuple):
            continue  # None, or unconstrained
        devices = math.prod(sharding.mesh.shape[axis] for axis in axes)
        if size % devices:
            named = " x ".join(f"{axis}={sharding.mesh.shape[axis]}" for axis in axes)
            below, above = size // devices * devices, -(-size // devices) * devices
            fitting = f"{below} or {above}" if below else f"{above}"
            raise ArgumentError(
                f"The mesh {'axis' if len(axes) == 1 else 'axes'} {named} "
                f"{'does' if len(axes) == 1 else 'do'} not divide axis {index} of {name}, of size "
                f"{size}: make that size {fitting}, change the mesh (--mesh.{axes[0]}), or leave "
                f"the axis unsharded, None instead of {entry!r} in {spec}."
            )
