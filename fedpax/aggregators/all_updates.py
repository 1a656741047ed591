"""Computations that need all updates: each device has some coordinates of all participants."""

import functools
import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from fedpax.aggregators.aggregator import mean_dtype
from fedpax.primitives.layout import explicit_axis, mesh_axis, spans_devices
from fedpax.primitives.placement import resolve_placement

_BLOCK_SIZE = 2**18  # 1 MB of float32


def reduce_coordinates(
    fn: Callable[[jax.Array], jax.Array], updates: chex.ArrayTree
) -> chex.ArrayTree:
    """Reduce each coordinate over all participants at once. Inside a program."""

    def reduce_leaf(leaf: jax.Array) -> jax.Array:
        x = _transpose(leaf.astype(jnp.float32))
        reduced = _by_blocks(x, functools.partial(_reduce_blocks, fn), fn)
        return _restore(reduced, leaf).astype(mean_dtype(leaf))

    return jax.tree.map(reduce_leaf, updates)


def squared_distances(updates: chex.ArrayTree) -> Float[Array, "participants participants"]:
    """Compute the squared distances between all pairs of updates. Inside a program."""
    # They follow from the inner products: one matmul per leaf, and one all-reduce. In float32 they
    # resolve distances above about 0.001 of the updates' norms.
    first, *rest = [_inner_products(_transpose(x)) for x in jax.tree.leaves(updates)]
    inner_products = sum(rest, first)
    squares = jnp.diagonal(inner_products)
    distances = squares[:, None] + squares[None, :] - (inner_products + inner_products.T)
    return jnp.where(jnp.isfinite(distances), jnp.maximum(distances, 0.0), jnp.inf)


def known_to_all(values: Shaped[Array, " participants"]) -> Shaped[Array, " participants"]:
    """Give every device the numbers of all participants. Inside a program."""
    return jax.sharding.reshard(values, P(None)) if _explicit(values) else values


def _by_blocks(
    x: jax.Array, blocks: Callable[[jax.Array], jax.Array], whole: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Compute `whole(x)`, on one CPU as `blocks(x)` if the array is larger than a block."""
    # On several devices, the boundaries of blocks would not match the devices' shards.
    if x.size <= _BLOCK_SIZE or spans_devices() or _explicit(x):
        return whole(x)
    return jax.lax.platform_dependent(x, cpu=blocks, default=whole)


def _reduce_blocks(
    fn: Callable[[jax.Array], jax.Array], x: Float[Array, "participants ..."]
) -> Float[Array, "..."]:
    """Reduce blocks of coordinates one after another, each in a CPU's cache."""
    size, width = math.prod(x.shape[1:]), max(_BLOCK_SIZE // x.shape[0], 1)
    rows = x.reshape(x.shape[0], size)

    def reduce_block(i: Int[Array, ""], reduced: Float[Array, " size"]) -> Float[Array, " size"]:
        start = jnp.minimum(i * width, size - width)  # the last two blocks may overlap
        block = jax.lax.dynamic_slice_in_dim(rows, start, width, 1)
        return jax.lax.dynamic_update_slice_in_dim(reduced, fn(block), start, 0)

    blocks = -(-size // width)
    return jax.lax.fori_loop(0, blocks, reduce_block, jnp.zeros(size, x.dtype)).reshape(x.shape[1:])


def _inner_products(x: jax.Array) -> Float[Array, "participants participants"]:
    return _by_blocks(x, _sum_blocks_of_products, _matmul)


def _sum_blocks_of_products(x: jax.Array) -> Float[Array, "participants participants"]:
    """Add the inner products of blocks of coordinates: a matmul of a CPU copies its operands."""
    size, width = math.prod(x.shape[1:]), max(_BLOCK_SIZE // x.shape[0], 1)
    rows, blocks = x.reshape(x.shape[0], size), size // width

    def add_block(i: Int[Array, ""], total: jax.Array) -> jax.Array:
        return total + _matmul(jax.lax.dynamic_slice_in_dim(rows, i * width, width, 1))

    rest = _matmul(rows[:, blocks * width :])
    return jax.lax.fori_loop(0, blocks, add_block, rest)


def _matmul(x: jax.Array) -> Float[Array, "participants participants"]:
    if jnp.issubdtype(x.dtype, jnp.integer):  # XLA fails at such a matmul on a GPU
        x = x.astype(jnp.float32)
    axes = tuple(range(1, x.ndim))
    return jax.lax.dot_general(
        x,
        x,
        ((axes, axes), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
        out_sharding=P(None, None) if _explicit(x) else None,
    )


def _transpose(leaf: jax.Array) -> jax.Array:
    """Move the placement's mesh axis from the participants to the coordinates."""
    # One axis of the leaf, of length l, is padded with zeros and split in two: `[ceil(l / d), d]`
    # for d devices, which then shard the second one. An axis that is sharded over a model axis of
    # the mesh keeps this sharding.
    placement = resolve_placement("aggregate", None).placement
    name = mesh_axis(placement)
    if name is None:
        return leaf
    leaf = leaf if leaf.ndim > 1 else leaf[:, None]
    axis, devices = _split(leaf, name)
    if excess := -leaf.shape[axis] % devices:
        leaf = jnp.pad(leaf, [(0, excess if i == axis else 0) for i in range(leaf.ndim)])
    shape = leaf.shape[:axis], leaf.shape[axis + 1 :]
    spec = tuple(jax.typeof(leaf).sharding.spec)
    leaf = jax.lax.reshape(
        leaf,
        (*shape[0], leaf.shape[axis] // devices, devices, *shape[1]),
        out_sharding=P(*spec[: axis + 1], None, *spec[axis + 1 :]) if _explicit(leaf) else None,
    )
    if explicit_axis(placement):
        return jax.sharding.reshard(leaf, P(None, *spec[1 : axis + 1], name, *spec[axis + 1 :]))
    free = P.UNCONSTRAINED
    axes = [name if i == axis + 1 else free for i in range(1, leaf.ndim)]
    return jax.lax.with_sharding_constraint(leaf, P(None, *axes))


def _restore(reduced: jax.Array, leaf: jax.Array) -> jax.Array:
    """Undo the split of `_transpose`, and give every participant's devices the result."""
    placement = resolve_placement("aggregate", None).placement
    name = mesh_axis(placement)
    if name is None:
        return reduced
    shape = leaf.shape[1:]
    axis, _ = _split(leaf if shape else leaf[:, None], name)
    spec = list(jax.typeof(reduced).sharding.spec)
    if explicit_axis(placement):
        spec[axis] = None
        reduced = jax.sharding.reshard(reduced, P(*spec))
    else:
        free = P.UNCONSTRAINED
        where = P(*[None if i == axis else free for i in range(reduced.ndim)])
        reduced = jax.lax.with_sharding_constraint(reduced, where)
    whole = jax.lax.reshape(
        reduced,
        (
            *reduced.shape[: axis - 1],
            math.prod(reduced.shape[axis - 1 : axis + 1]),
            *reduced.shape[axis + 1 :],
        ),
        out_sharding=P(*spec[:axis], *spec[axis + 1 :]) if _explicit(reduced) else None,
    )
    if not shape:
        return whole[0]
    return jax.lax.slice_in_dim(whole, 0, shape[axis - 1], axis=axis - 1)


def _split(leaf: jax.Array, name: str) -> tuple[int, int]:
    """Choose the axis to split, and return it with the number of devices."""
    # The best axis needs no padding; then one that is not sharded; then the longest one.
    devices = jax.sharding.get_abstract_mesh().shape[name]
    spec = jax.typeof(leaf).sharding.spec

    def cost(axis: int) -> tuple[bool, bool, int]:
        length = leaf.shape[axis]
        whole = -length % devices == 0
        return not whole, spec[axis] is not None, -length

    return min(range(1, leaf.ndim), key=cost), devices


def _explicit(x: jax.Array) -> bool:
    return any(entry is not None for entry in jax.typeof(x).sharding.spec)
