"""Find the largest entries of blocks."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedpax.aggregators.codecs.bit_packing import pack_bits

_FEW_ENTRIES = 2**16  # compiling the faster search would take longer than it saves
_VALUE_BITS = 31  # of a float without its sign


def largest(values: Float[Array, "entries ..."], k: int) -> Int[Array, "k ..."]:
    """Return the indices of the k largest entries along the leading axis, in any order."""
    if values.size < _FEW_ENTRIES:
        return _with_heap(values, k)
    return jax.lax.platform_dependent(
        values, cpu=lambda x: _with_groups(x, k), default=lambda x: _with_heap(x, k)
    )


def _with_heap(values: Float[Array, "entries ..."], k: int) -> Int[Array, "k ..."]:
    return jnp.moveaxis(jax.lax.top_k(jnp.moveaxis(values, 0, -1), k)[1], -1, 0)


def _with_groups(values: Float[Array, "entries ..."], k: int) -> Int[Array, "k ..."]:
    """Search the k groups with the largest maxima: they have the k largest entries."""
    # XLA's top_k keeps a heap for one block after another on a CPU. Here, all blocks are searched
    # at once by vector instructions, in half the time.
    entries = len(values)
    # The bits of floats that are not negative are in the order of the floats, NaN above infinity.
    order = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
    size = math.isqrt(entries // k)  # entries of a group: as many maxima as entries are searched
    if size == 1:
        return _with_bits(order, k)
    groups = -(-entries // size)
    padding = [(0, -entries % groups), *[(0, 0)] * (values.ndim - 1)]
    padded = jnp.pad(order, padding, constant_values=-1)
    maxima = jnp.max(padded.reshape(-1, groups, *values.shape[1:]), axis=0)
    chosen = _with_bits(maxima, k)
    candidates = jnp.concatenate([chosen + start for start in range(0, len(padded), groups)])
    places = _with_bits(jnp.take_along_axis(padded, candidates, axis=0), k)
    return jnp.take_along_axis(candidates, places, axis=0)


def _with_bits(order: Int[Array, "entries ..."], k: int) -> Int[Array, "k ..."]:
    """Return the indices of the k largest integers, of which at least k are not negative."""

    def set_bit(i: jax.Array, least: jax.Array) -> jax.Array:
        higher = least | jnp.int32(1) << (_VALUE_BITS - 1 - i)
        return jnp.where(jnp.sum(order >= higher, axis=0, dtype=jnp.int32) >= k, higher, least)

    # The k-th largest, from its highest bit to its lowest.
    least = jax.lax.fori_loop(0, _VALUE_BITS, set_bit, jnp.zeros_like(order[0]))
    above, equal = pack_bits(order > least, 1), pack_bits(order == least, 1)
    rows = len(above)
    row_numbers = jax.lax.broadcasted_iota(jnp.int32, (2 * rows, *order.shape[1:]), 0)

    def take(words: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        first = jnp.min(jnp.where(words != 0, row_numbers, 2 * rows), axis=0)
        word = jnp.sum(jnp.where(row_numbers == first, words, 0), axis=0, dtype=jnp.uint32)
        bit = jax.lax.population_count((word & -word) - 1).astype(jnp.int32)
        rest = jnp.where(row_numbers == first, words & (words - 1), words)
        return rest, bit * rows + first % rows

    return jax.lax.scan(take, jnp.concatenate([above, equal]), length=k)[1]
