"""Random keys of aggregators: they differ by seed, purpose, stream and round."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Key, UInt32

from fedpax.checks import IntRange, check_argument

PURPOSES = (
    "add_noise",
    "add_local_noise",
    "private_mean",
    "quantile",
    "masks",
    "discrete_gaussian",
)
"""The sources of randomness of this package: each draws from separate keys for every seed."""

_STREAMS = 2**32 - 1  # folded in before the indices of streams: no purpose or round has this number

# The cache of `jax.jit` depends on a user context: it traces a function once for each stream.
_indices = jax.make_user_context(())


@contextmanager
def random_stream(index: int) -> Iterator[None]:
    """Draw the random numbers of aggregators from their own stream within the context.

    A method with several states of one aggregator calls `aggregate` in a stream per state.
    Otherwise their noise, masks and rounding are equal, and their difference has no noise.

    Args:
        index: index of the stream, a Python int of at least 0. Stream 0 is the default. In nested
            contexts, each combination of indices is a stream.

    Raises:
        TypeError: `index` is not an int.
        ValueError: `index` is negative.

    Example:
        >>> import fedpax
        >>> import jax.numpy as jnp
        >>> from fedpax.aggregators import add_noise, chain, mean
        >>> aggregator = chain(add_noise(1.0, seed=0), mean())
        >>> @fedpax.program(clients=2)
        ... def average(updates):
        ...     state = aggregator.init(None)
        ...     first = aggregator.aggregate(state, updates, None)[0]
        ...     with random_stream(1):
        ...         return first, aggregator.aggregate(state, updates, None)[0]
        >>> first, second = average(jnp.zeros(2))
        >>> bool(first == second)
        False
    """
    remedy = "Pass the number of the state, such as the number of a cluster or fragment."
    index = check_argument(
        "random_stream", "index", index, IntRange(least=0, most=_STREAMS - 1), remedy=remedy
    )
    with _indices((*_indices.value, index)):
        yield


class _TracedIndex:
    """An index that a loop computes; equal only to itself, as the cache of `jax.jit` needs."""

    def __init__(self, index: Int[Array, ""]) -> None:
        self.index = index


@contextmanager
def traced_random_stream(index: Int[Array, ""]) -> Iterator[None]:
    """Draw from the stream of `random_stream(index)`, for an index that a loop computes."""
    with _indices((*_indices.value, _TracedIndex(index))):
        yield


def in_stream(key: jax.Array) -> jax.Array:
    """Return a key's variant for the streams in context; the key itself in stream 0."""
    result, key = key, jax.random.fold_in(key, _STREAMS)
    for index in _indices.value:
        # Stream 0 is the default: after the last other index, it adds nothing to the key.
        if isinstance(index, _TracedIndex):
            key = jax.random.fold_in(key, index.index)
            result = jnp.where(index.index == 0, result, key)
        else:
            key = jax.random.fold_in(key, index)
            result = key if index else result
    return result


def round_key(seed: int, purpose: str, round_number: Int[Array, ""]) -> jax.Array:
    """Return the key of a source of randomness for a round, in the streams in context."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), PURPOSES.index(purpose))
    return jax.random.fold_in(in_stream(key), round_number)


# ---- random words by a hash of their indices, for masks, stochastic rounding and noise


def random_words(
    key: Key[Array, ""], shape: tuple[int, ...], sharding: P | None = None
) -> UInt32[Array, "..."]:
    """Draw random words: a hash of their indices and the key, the same on any mesh."""
    # Unlike words of `jax.random`, they are fused into what reads them. They hide nothing from an
    # adversary. With one key, no word repeats within 2^32 indices.
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    return rehash(hashed_indices(first, shape, sharding), second)


def hashed_indices(
    seed: UInt32[Array, ""], shape: tuple[int, ...], sharding: P | None = None
) -> UInt32[Array, "..."]:
    """Hash the indices of an array once: half of `random_words`."""
    # Several calls of `rehash` can share it, each with another seed.
    indices = jnp.zeros((), jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        places = jax.lax.broadcasted_iota(jnp.uint32, shape, axis, out_sharding=sharding)
        indices += stride * places
    return _hash(indices + seed)


def rehash(hashed: UInt32[Array, "..."], seed: UInt32[Array, ""]) -> UInt32[Array, "..."]:
    """Draw random words from `hashed_indices` with a second seed: one hash for each word."""
    return _hash(hashed ^ seed)


def random_normal(
    key: Key[Array, ""],
    shape: tuple[int, ...],
    *,
    stddev: float = 1.0,
    sharding: P | None = None,
) -> Float[Array, "..."]:
    """Draw normal numbers, each from a word of `random_words`, the same on any mesh."""
    return normal_from_words(random_words(key, shape, sharding), stddev)


def normal_from_words(words: UInt32[Array, "..."], stddev: float) -> Float[Array, "..."]:
    """Map uniform random words to normal numbers: the quantiles of their upper 24 bits."""
    odd = 2 * (words >> 8).astype(jnp.int32) + (1 - 2**24)  # float32 numbers hold it
    # One factor: XLA would group two in an order that depends on the program.
    return math.sqrt(2) * stddev * jax.lax.erf_inv(odd.astype(jnp.float32) * 2.0**-24)


def _hash(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Permute the integers of 32 bits: shifts and odd factors, so that all bits mix."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 15)
