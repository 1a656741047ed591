"""`federated_broadcast`: the server's value, given to every participant."""

from typing import Any

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
from fedpax.primitives.placement import Placement, check_array, resolve_placement

federated_broadcast_p = Primitive("federated_broadcast")


def federated_broadcast(x: Any, *, placement: str | None = None) -> Any:
    """Gives every participant the server's value: `out[i] = x` for each participant `i`.

    Args:
        x: a pytree of arrays or numbers, of any shape and dtype.
        placement: the placement's name; needed where the program has several.

    Returns:
        The same pytree; a leaf of shape `[...]` becomes `[n, ...]`, of the same dtype. On a mesh
        with an axis of the placement's name the leading axis is laid out over it, and the other
        axes stay as they are.

    Raises:
        RuntimeError: outside of a program.
        TypeError: a leaf that is no array and no number.
        ValueError: an unknown placement, or none named where there are several.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> @fedpax.program(clients=3)
        ... def tell(x):
        ...     return fedpax.federated_broadcast(x)
        >>> tell(jnp.array([1.0, 2.0])).tolist()
        [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]

    Reference:
        Rush et al., Federated Automatic Differentiation, arXiv:2301.07806, section 3.
    """
    target = resolve_placement("federated_broadcast", placement).placement
    leaves, tree = jax.tree.flatten_with_path(x)
    arrays = [
        check_array("federated_broadcast", leaf, "x" + jax.tree_util.keystr(path))
        for path, leaf in leaves
    ]
    return jax.tree.unflatten(tree, [broadcast(a, target) for a in arrays])


def broadcast(x: jax.Array, placement: Placement) -> jax.Array:
    """Binds the primitive for one array."""
    return federated_broadcast_p.bind(x, placement=placement)


def _abstract(x, *, placement):
    return placed_aval(x, placement), set()


def _implementation(x, *, placement):
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


def _jvp(primals, tangents, *, placement):
    (x,), (t,) = primals, tangents
    out = broadcast(x, placement)
    return out, zero_tangent(out) if is_zero(t) else broadcast(t, placement)


def _batch(axis, args, dims, *, placement):
    return broadcast(args[0], placement), dims[0] + 1


define(
    federated_broadcast_p,
    abstract=_abstract,
    implementation=_implementation,
    jvp=_jvp,
    batch=_batch,
)


# ---- what the server can tell each participant without a value: its number

federated_index_p = Primitive("federated_index")
"""int32 `[n]`, the number of each participant: a loop counts them, and stores none."""


def _index_abstract(*, placement):
    return placed_aval(jax.core.ShapedArray((), jnp.dtype(jnp.int32)), placement), set()


def _index_implementation(*, placement):
    return shard_over_placement(jnp.arange(placement.size, dtype=jnp.int32), placement)


define(federated_index_p, abstract=_index_abstract, implementation=_index_implementation)
