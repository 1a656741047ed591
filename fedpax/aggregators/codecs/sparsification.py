"""Some entries alone."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

from fedpax.aggregators.codecs.codec import (
    Codec,
    check_block_size,
    float32,
    pack_bits,
    packed_words,
    unpack_bits,
)
from fedpax.aggregators.codecs.rotated import check_codec
from fedpax.aggregators.random_numbers import random_words
from fedpax.checks import PROBABILITY, check_argument

SPARSE_BLOCK_SIZE = 4096
"""Default block size of the sparse codecs: an index has 12 bits."""


def random_k(
    fraction: float,
    *,
    unbiased: bool = True,
    values: Codec | None = None,
    block_size: int = SPARSE_BLOCK_SIZE,
) -> Codec:
    """Send a random subset of the entries of each block; the others are decoded to 0.

    Of d entries, k = ceil(fraction d) are sent. Their places come from the shared key.

    Args:
        fraction: fraction of the entries that is sent, above 0 and at most 1.
        unbiased: whether the entries are scaled by d / k. Default True: the code is unbiased, with
            E ||decode - x||^2 = (d / k - 1) ||x||^2. False: no scale, for error feedback, with
            E ||decode - x||^2 = (1 - k / d) ||x||^2.
        values: codec of the k values of a block. Default None: `float32()`, exact.
        block_size: largest number of entries of a block. Default 4096.

    Returns:
        The codec. It is contractive if `unbiased` is False and `values` is contractive.

    Raises:
        TypeError: `fraction` is not a number, `values` not a codec, or `block_size` not an int.
        ValueError: `fraction` or `block_size` is out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> codec, key = random_k(0.5), jax.random.key(0)
        >>> sent = codec.decode(key, codec.encode(key, jnp.array([1.0, -7.0, 0.5, 2.0])), 4)
        >>> sum(entry in (0, doubled) for entry, doubled in zip(sent.tolist(), [2, -14, 1, 4]))
        4
        >>> int(jnp.sum(sent != 0))
        2

    Reference:
        Konečný et al., arXiv:1610.05492, section 3 (random mask, sent as a seed). Stich et al.,
        arXiv:1809.07599, section 2.
    """
    fraction = check_fraction("random_k", fraction)
    value_codec = float32() if values is None else values
    check_codec("random_k", "values", value_codec)

    def places(key: Key[Array, ""], entries: int) -> tuple[Int[Array, " k"], Key[Array, ""]]:
        places_key, values_key = jax.random.split(key)
        # 24 bits, which are exact in float32: a CPU selects the largest floats without sorting.
        draws = (random_words(places_key, (entries,)) >> 8).astype(jnp.float32)
        return jax.lax.top_k(draws, count(fraction, entries))[1], values_key

    def encode(
        key: Key[Array, ""], blocks: Float[Array, "entries ..."]
    ) -> UInt32[Array, "words ..."]:
        indices, values_key = places(key, blocks.shape[0])
        scale = blocks.shape[0] / len(indices) if unbiased else 1.0
        return value_codec.encode(values_key, scale * jnp.take(blocks, indices, axis=0))

    def decode(
        key: Key[Array, ""], words: UInt32[Array, "words ..."], entries: int
    ) -> Float[Array, "entries ..."]:
        indices, values_key = places(key, entries)
        sent = value_codec.decode(values_key, words, len(indices))
        zeros = jnp.zeros((entries, *words.shape[1:]), jnp.float32)
        return zeros.at[indices].set(sent, unique_indices=True)

    contractive = value_codec.contractive and not unbiased
    return Codec(encode, decode, check_block_size("random_k", block_size), contractive)


def count(fraction: float, entries: int) -> int:
    """Return the number of entries that a fraction of a block is, rounded up."""
    return min(entries, math.ceil(fraction * entries))


def check_fraction(function: str, fraction: float) -> float:
    """Return a fraction, a number above 0 and at most 1."""
    remedy = "Use 0.01 to send one entry in a hundred."
    return check_argument(function, "fraction", fraction, PROBABILITY, remedy=remedy)


def top_k(
    fraction: float, *, values: Codec | None = None, block_size: int = SPARSE_BLOCK_SIZE
) -> Codec:
    """Send the entries of largest magnitude of each block; the others are decoded to 0.

    Of d entries, k = ceil(fraction d) values and indices of ceil(log2 d) bits are sent. The code is
    biased, and the best k-sparse approximation: ||decode - x||^2 <= (1 - k/d) ||x||^2.

    Args:
        fraction: fraction of the entries that is sent, above 0 and at most 1.
        values: codec of the k values of a block. Default None: `float32()`, exact.
        block_size: largest number of entries of a block. Default 4096, as in SparseLoCo.

    Returns:
        The codec. Use it with error feedback. It is contractive if `values` is.

    Raises:
        TypeError: `fraction` is not a number, `values` not a codec, or `block_size` not an int.
        ValueError: `fraction` or `block_size` is out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> codec, key = top_k(0.5), jax.random.key(0)
        >>> codec.decode(key, codec.encode(key, jnp.array([1.0, -7.0, 0.5, 2.0])), 4).tolist()
        [0.0, -7.0, 0.0, 2.0]

    Reference:
        Stich et al., arXiv:1809.07599, section 2. Sarfi et al., SparseLoCo, arXiv:2508.15706 (the
        largest entries of blocks).
    """
    fraction = check_fraction("top_k", fraction)
    value_codec = float32() if values is None else values
    check_codec("top_k", "values", value_codec)

    def encode(
        key: Key[Array, ""], blocks: Float[Array, "entries ..."]
    ) -> UInt32[Array, "words ..."]:
        entries = blocks.shape[0]
        indices = largest(jnp.abs(blocks), count(fraction, entries))
        kept = jnp.take_along_axis(blocks, indices, axis=0)
        return jnp.concatenate(
            [pack_bits(indices, _index_bits(entries)), value_codec.encode(key, kept)]
        )

    def decode(
        key: Key[Array, ""], words: UInt32[Array, "words ..."], entries: int
    ) -> Float[Array, "entries ..."]:
        k, bits = count(fraction, entries), _index_bits(entries)
        split = packed_words(k, bits)
        indices = unpack_bits(words[:split], bits, k)
        return _scatter(indices, value_codec.decode(key, words[split:], k), entries)

    return Codec(encode, decode, check_block_size("top_k", block_size), value_codec.contractive)


def _index_bits(entries: int) -> int:
    return max(1, (entries - 1).bit_length())


def _scatter(
    indices: Int[Array, "k ..."], values: Float[Array, "k ..."], entries: int
) -> Float[Array, "entries ..."]:
    """Place values at indices along the leading axis, and zeros elsewhere."""
    # With batching axes, a compiler keeps the other axes where they are, and their sharding.
    rest = tuple(range(1, indices.ndim))
    return jax.lax.scatter(
        jnp.zeros((entries, *indices.shape[1:]), values.dtype),
        indices[..., None],
        values,
        jax.lax.ScatterDimensionNumbers(
            update_window_dims=(),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0,),
            operand_batching_dims=rest,
            scatter_indices_batching_dims=rest,
        ),
        unique_indices=True,
    )


# ---- find the largest entries of blocks

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
    # NaN counts as the largest. On a GPU, XLA's top_k ranks it below numbers.
    values = jnp.where(jnp.isnan(values), jnp.inf, values)
    return jnp.moveaxis(jax.lax.top_k(jnp.moveaxis(values, 0, -1), k)[1], -1, 0)


def _with_groups(values: Float[Array, "entries ..."], k: int) -> Int[Array, "k ..."]:
    """Search the k groups with the largest maxima: they have the k largest entries."""
    # On a CPU, in half the time of XLA's top_k: vector instructions search all blocks at once.
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
