"""The shards of arrays on this process's devices; random keys as the integers they consist of."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

Region: TypeAlias = tuple[tuple[int, int], ...]
"""A part of an array: start and stop on each axis."""


def own_shards(leaf: jax.Array) -> Iterator[tuple[Region, np.ndarray]]:
    """Yield the values of this process's devices, each region once."""
    data = integers(leaf)
    seen = set()
    for shard in data.addressable_shards:
        region = to_region(shard.index, data.shape)
        if region not in seen:
            seen.add(region)
            yield region, np.asarray(shard.data)


def assemble(leaf: Any, shards: Mapping[Region, np.ndarray]) -> jax.Array:
    """Make a global array of this process's shards."""
    shape, sharding = shape_and_sharding(leaf)
    data = jax.make_array_from_callback(
        shape, sharding, lambda index: shards[to_region(index or (), shape)]
    )
    if not _is_key(leaf):
        return data
    implementation = _key_implementation(leaf)
    wrap = jax.jit(
        lambda data: jax.random.wrap_key_data(data, impl=implementation),
        out_shardings=leaf.sharding,
    )
    return wrap(data)


def integers(leaf: jax.Array) -> jax.Array:
    """Return an array's values; for random keys integers, with one more axis."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def shape_and_sharding(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Return shape and sharding of an array's values, from the array or its abstract value."""
    if not _is_key(leaf):
        return tuple(leaf.shape), leaf.sharding
    values = jax.eval_shape(jax.random.key_data, _shape(leaf))
    sharding = leaf.sharding
    spec = (*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec)), None)
    return values.shape, NamedSharding(sharding.mesh, PartitionSpec(*spec))


def integer_dtype(leaf: Any) -> np.dtype:
    """Return the dtype of an array's values, from the array or its abstract value."""
    return np.dtype(np.uint32) if _is_key(leaf) else np.dtype(leaf.dtype)


def to_region(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """Return the region of an index into an array of a shape."""
    sizes = zip(index, shape, strict=True)
    return tuple(each.indices(size)[:2] for each, size in sizes)


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _key_implementation(leaf: Any) -> str:
    names: list[Any] = []
    jax.eval_shape(lambda keys: names.append(jax.random.key_impl(keys)), _shape(leaf))
    return str(names[0])


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
