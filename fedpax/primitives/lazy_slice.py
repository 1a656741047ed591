"""LazySlice: a participant's slice that nested loops read from the full array, without a copy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpax.primitives.client_rows import ClientRows
from fedpax.primitives.layout import unplaced_aval


class LazySlice(NamedTuple):
    """A lazy slice: the full stacked array plus the index of one participant.

    A nested loop reads such a value directly from the full array, without a copy.

    Attributes:
        array: array whose first axes belong to placements, the outermost first. In a pytree of
            types or of partition specs: its type or its spec.
        indices: int32 scalars, the index along each of these axes. In a pytree of types or of
            partition specs: their types or specs.
    """

    array: Any
    indices: tuple[Any, ...]


def materialize(value: Any) -> jax.Array:
    """Return a value as an array; slice it out of the full array if it is a `LazySlice`."""
    if not isinstance(value, LazySlice):
        return value
    depth = len(value.indices)
    starts = (*value.indices, *[jnp.int32(0)] * (value.array.ndim - depth))
    sizes = (*[1] * depth, *value.array.shape[depth:])
    return jax.lax.squeeze(jax.lax.dynamic_slice(value.array, starts, sizes), range(depth))


def aval_of_value(value: Any) -> Any:
    """Return the type of an array, or that a `LazySlice` or `ClientRows` stands for."""
    if isinstance(value, ClientRows):
        aval = jax.typeof(value.rows)
        return aval.update(shape=(*value.client_ids.shape, *aval.shape[1:]))
    if not isinstance(value, LazySlice):
        return jax.typeof(value)
    aval = jax.typeof(value.array)
    for _ in value.indices:
        aval = unplaced_aval(aval)
    return aval
