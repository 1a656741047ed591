"""`federated_broadcast`, and the index of each participant."""

from __future__ import annotations

from typing import overload

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fedpax.primitives._jax import Primitive, define, is_zero, zero_tangent
from fedpax.primitives.layout import (
    explicit_axis,
    mesh_axis,
    placed_aval,
    placed_spec,
    replicate_over_placement,
    shard_over_placement,
)
from fedpax.primitives.placement import (
    ArrayTree,
    Placement,
    Tree,
    check_array,
    resolve_placement,
)

federated_broadcast_p = Primitive("federated_broadcast")
"""The primitive of `federated_broadcast`."""


@overload
def federated_broadcast(x: jax.typing.ArrayLike, *, placement: str | None = None) -> jax.Array: ...
@overload
def federated_broadcast(x: Tree, *, placement: str | None = None) -> Tree: ...
def federated_broadcast(x: ArrayTree, *, placement: str | None = None) -> ArrayTree:
    """Broadcast a server value to all participants: `out[i] = x` for each participant `i`.

    Args:
        x: pytree of arrays or numbers of any shape and dtype.
        placement: name of the placement. Default None: the only placement of the program.

    Returns:
        The same pytree; a leaf of shape `[...]` becomes `[n, ...]` of the same dtype. A mesh axis
        with the placement's name shards the leading dimension; others keep their sharding.

    Raises:
        RuntimeError, TypeError, ValueError: as in `federated_map`.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> @fedpax.program(clients=3)
        ... def copies(x):
        ...     return fedpax.federated_broadcast(x)
        >>> copies(jnp.array([1.0, 2.0])).tolist()
        [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]

    Reference:
        Rush et al., arXiv:2301.07806, section 3.
    """
    target = resolve_placement("federated_broadcast", placement).placement
    leaves, tree = jax.tree.flatten_with_path(x)
    arrays = [
        check_array("federated_broadcast()", leaf, "x" + jax.tree_util.keystr(path))
        for path, leaf in leaves
    ]
    return jax.tree.unflatten(tree, [broadcast(a, target) for a in arrays])


def broadcast(x: jax.Array, placement: Placement) -> jax.Array:
    """Bind the primitive for one array."""
    return federated_broadcast_p.bind(x, placement=placement)


def broadcast_closure(x: jax.Array, placement: Placement) -> jax.Array:
    """Bind the primitive for an array that a mapped function closes over."""
    # It is marked if it has the shape of a placed value: each participant then reads the values of
    # all participants (`fedpax.transforms.placed_closures`).
    mark = {"closed_over": True} if x.shape[:1] == (placement.size,) else {}
    return federated_broadcast_p.bind(x, placement=placement, **mark)


def _abstract(x, *, placement, closed_over=False):
    return placed_aval(x, placement), set()


def _implementation(x, *, placement, closed_over=False):
    shape = (placement.size, *x.shape)
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        spec = placed_spec(jax.typeof(x), placement)
        out = jnp.broadcast_to(replicate_over_placement(x, placement), shape, out_sharding=spec)
    else:
        out = jnp.broadcast_to(x, shape)
    axis = mesh_axis(placement)
    if axis is None or explicit_axis(placement):
        return out
    return jax.lax.with_sharding_constraint(out, P(axis, *[P.UNCONSTRAINED] * x.ndim))


def _jvp(primals, tangents, *, placement, closed_over=False):
    (x,), (t,) = primals, tangents
    out = broadcast(x, placement)
    return out, zero_tangent(out) if is_zero(t) else broadcast(t, placement)


def _batch(axis, args, dims, *, placement, closed_over=False):
    return broadcast(args[0], placement), dims[0] + 1


define(
    federated_broadcast_p,
    abstract=_abstract,
    implementation=_implementation,
    jvp=_jvp,
    batch=_batch,
)


federated_index_p = Primitive("federated_index")
"""int32 `[n]`: the index of each participant. In a loop it is the counter and is never stored."""


def _index_abstract(*, placement):
    return placed_aval(jax.core.ShapedArray((), jnp.dtype(jnp.int32)), placement), set()


def _index_implementation(*, placement):
    return shard_over_placement(jnp.arange(placement.size, dtype=jnp.int32), placement)


define(federated_index_p, abstract=_index_abstract, implementation=_index_implementation)
