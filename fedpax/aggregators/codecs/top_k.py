"""The entries of largest magnitude, and where they are."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

from fedpax.aggregators.codecs.bit_packing import pack_bits, packed_words, unpack_bits
from fedpax.aggregators.codecs.codec import Codec, check_block_size, float32
from fedpax.aggregators.codecs.random_k import SPARSE_BLOCK_SIZE, check_fraction, count
from fedpax.aggregators.codecs.rotated import check_codec

_MOST_ROWS = 16  # a program has a few operations for each row
_FEW_ENTRIES = 2**16  # compiling the faster search would take longer than it saves


def top_k(
    fraction: float, *, values: Codec | None = None, block_size: int = SPARSE_BLOCK_SIZE
) -> Codec:
    """Send the entries of largest magnitude of each block; the others are decoded to 0.

    Of d entries, k = ceil(fraction d) are sent: k values and k indices of ceil(log2 d) bits. With
    blocks of 4,096 entries, an index has 12 bits. The code is biased. It is the best k-sparse
    approximation: ||decode - x||^2 <= (1 - k/d) ||x||^2.

    Args:
        fraction: fraction of the entries that is sent, above 0 and at most 1.
        values: codec of the k values of a block. Default None: `float32()`, exact. SparseLoCo sends
            2 bits: `top_k(1 / 64, values=sign(bits=2))`.
        block_size: largest number of entries of a block. Default 4096, as in SparseLoCo. Larger
            blocks come closer to the top k of the whole parameter.

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
        Stich et al., Sparsified SGD with Memory, arXiv:1809.07599, section 2.
        Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, arXiv:2508.15706
        (the largest entries of blocks).
    """
    fraction = check_fraction("top_k", fraction)
    value_codec = float32() if values is None else values
    check_codec("top_k", "values", value_codec)

    def encode(
        key: Key[Array, ""], blocks: Float[Array, "entries ..."]
    ) -> UInt32[Array, "words ..."]:
        entries = blocks.shape[0]
        indices = _largest(jnp.abs(blocks), count(fraction, entries))
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


def _largest(magnitudes: Float[Array, "entries ..."], k: int) -> Int[Array, "k ..."]:
    """Return the indices of the k largest entries along the leading axis."""
    search = functools.partial(_search, k=k)
    if magnitudes.size < _FEW_ENTRIES:
        return search(magnitudes)
    behind_maxima = functools.partial(_search_behind_maxima, k=k)
    return jax.lax.platform_dependent(magnitudes, cpu=behind_maxima, default=search)


def _search(magnitudes: Float[Array, "entries ..."], k: int) -> Int[Array, "k ..."]:
    return jnp.moveaxis(jax.lax.top_k(jnp.moveaxis(magnitudes, 0, -1), k)[1], -1, 0)


def _search_behind_maxima(magnitudes: Float[Array, "entries ..."], k: int) -> Int[Array, "k ..."]:
    """Search with the maxima of at least k groups of entries in front of the others.

    A CPU keeps a heap of the largest entries so far, and spends its time on those that enter it and
    leave again. Behind the maxima, few others enter: it takes two thirds of the time.
    """
    entries = len(magnitudes)
    size = max(k, -(-entries // _MOST_ROWS))
    padding = [(0, -entries % size), *[(0, 0)] * (magnitudes.ndim - 1)]
    padded = jnp.pad(magnitudes, padding, constant_values=-1)
    # Written out by row, as in pack_bits, so that a compiler vectorizes it.
    rows = [padded[i : i + size] for i in range(0, len(padded), size)]
    maxima = functools.reduce(jnp.maximum, rows)
    found = [
        jnp.where((row == maxima) | jnp.isnan(row), i, len(rows)) for i, row in enumerate(rows)
    ]
    row_of_maximum = functools.reduce(jnp.minimum, found)
    others = [jnp.where(row_of_maximum == i, -1, row) for i, row in enumerate(rows)]
    places = _search(jnp.concatenate([maxima, *others]), k)
    row = jnp.take_along_axis(row_of_maximum, jnp.minimum(places, size - 1), axis=0)
    return jnp.where(places < size, row * size + places, places - size)


def _index_bits(entries: int) -> int:
    return max(1, (entries - 1).bit_length())


def _scatter(
    indices: Int[Array, "k ..."], values: Float[Array, "k ..."], entries: int
) -> Float[Array, "entries ..."]:
    """Place values at indices along the leading axis, and zeros elsewhere."""
    # With batching axes, a compiler keeps the other axes where they are, and their sharding.
    others = tuple(range(1, indices.ndim))
    return jax.lax.scatter(
        jnp.zeros((entries, *indices.shape[1:]), values.dtype),
        indices[..., None],
        values,
        jax.lax.ScatterDimensionNumbers(
            update_window_dims=(),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0,),
            operand_batching_dims=others,
            scatter_indices_batching_dims=others,
        ),
        unique_indices=True,
    )
