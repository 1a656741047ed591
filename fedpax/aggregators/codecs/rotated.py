"""A random rotation before another codec."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

from fedpax.aggregators.codecs.codec import Codec
from fedpax.errors import ArgumentTypeError


def rotated(codec: Codec) -> Codec:
    """Rotate each block by a randomized Hadamard transform before another codec encodes it.

    With a block x of d = 2^m entries, the Hadamard matrix H and random signs D:

        z = H D x / sqrt(d);   decode = D H codec.decode(codec.encode(z)) / sqrt(d).

    The range of z is about ||x|| sqrt(log(d) / d): a uniform quantizer has a small error. The
    rotation keeps an inner codec unbiased or contractive. A block is padded with zeros to a power
    of two. D is new for each parameter, participant and round.

    Args:
        codec: the codec of the rotated blocks, such as `uniform(bits)`.

    Raises:
        TypeError: `codec` is not a `Codec`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fedpax.aggregators.codecs import uniform
        >>> key, x = jax.random.key(0), jax.random.normal(jax.random.key(1), (512,)).at[7].set(30.0)
        >>> def squared_error(codec):
        ...     return jnp.sum((codec.decode(key, codec.encode(key, x), 512) - x) ** 2).item()
        >>> squared_error(rotated(uniform(bits=3))) < squared_error(uniform(bits=3)) / 4
        True

    Reference:
        Suresh et al., arXiv:1611.00429, section 3 (stochastic rotated quantization).
    """
    check_codec("rotated", "codec", codec)

    def encode(
        key: Key[Array, ""], blocks: Float[Array, "entries ..."]
    ) -> UInt32[Array, "words ..."]:
        size = _power_of_two(blocks.shape[0])
        signs_key, codec_key = jax.random.split(key)
        padding = [(0, size - blocks.shape[0]), *[(0, 0)] * (blocks.ndim - 1)]
        signed = jnp.pad(blocks, padding) * _random_signs(signs_key, size, blocks.ndim)
        return codec.encode(codec_key, hadamard_transform(signed))

    def decode(
        key: Key[Array, ""], words: UInt32[Array, "words ..."], entries: int
    ) -> Float[Array, "entries ..."]:
        size = _power_of_two(entries)
        signs_key, codec_key = jax.random.split(key)
        signed = hadamard_transform(codec.decode(codec_key, words, size))
        return (signed * _random_signs(signs_key, size, signed.ndim))[:entries]

    return codec._replace(encode=encode, decode=decode)


def hadamard_transform(x: Float[Array, "entries ..."]) -> Float[Array, "entries ..."]:
    """Multiply by the orthonormal Hadamard matrix along the leading axis."""
    # The matrix of 2^m rows is the Kronecker product of two Hadamard matrices of about 2^(m/2)
    # rows: two matmuls, in half the time of additions on a CPU. They have float32 precision on any
    # hardware. The second one is batched, so that no axis moves.
    size = x.shape[0]
    inner = 1 << (size.bit_length() - 1) // 2
    outer = size // inner
    y = x.reshape(outer, inner, *x.shape[1:])
    y = _matmul(_hadamard_matrix(outer) / math.sqrt(size), y, (((1,), (0,)), ((), ())))
    inners = jnp.broadcast_to(_hadamard_matrix(inner), (outer, inner, inner))
    return _matmul(inners, y, (((2,), (1,)), ((0,), (0,)))).reshape(x.shape)


def check_codec(function: str, argument: str, codec: Codec) -> None:
    """Raise a TypeError unless an argument is a codec."""
    if not isinstance(codec, Codec):
        raise ArgumentTypeError(
            f"{function}(): {argument} is a {type(codec).__name__}, expected a codec. Call its "
            "function, for example codecs.uniform(bits=4)."
        )


def _hadamard_matrix(size: int) -> Float[Array, "size size"]:
    """Return the Hadamard matrix of a power of two, (-1)^(number of bits of i & j)."""
    rows = jnp.arange(size, dtype=jnp.uint32)
    odd = jax.lax.population_count(rows[:, None] & rows) & 1
    return 1 - 2 * odd.astype(jnp.float32)


def _matmul(x: jax.Array, y: jax.Array, dimensions: jax.lax.DotDimensionNumbers) -> jax.Array:
    return jax.lax.dot_general(x, y, dimensions, jax.lax.Precision.HIGHEST)


def _random_signs(key: Key[Array, ""], size: int, ndim: int) -> Float[Array, "..."]:
    return jax.random.rademacher(key, (size, *[1] * (ndim - 1)), jnp.float32)


def _power_of_two(entries: int) -> int:
    """Return the smallest power of two that is at least `entries`."""
    return 1 << (entries - 1).bit_length()
