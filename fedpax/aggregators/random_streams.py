"""Random keys of aggregators: they differ by seed, purpose, stream and round."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

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

# The cache of `jax.jit` depends on a user context: a jitted function that is called in two streams
# is traced once for each.
_indices = jax.make_user_context(())


@contextmanager
def random_stream(index: int) -> Iterator[None]:
    """Draw the random numbers of aggregators from a stream of their own within the context.

    A method that keeps several states of one aggregator, one per cluster or per fragment, calls
    `aggregate` in a stream per state. Without it, aggregates of the same shape have the same noise,
    masks and rounding in a round, so that their difference is free of noise.

    Args:
        index: index of the stream, a Python int of at least 0: the number of the state. Stream 0
            has the random numbers of no stream. In nested contexts, each combination of indices is
            a separate stream.

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
        ...     means = []
        ...     for cluster in range(2):
        ...         with random_stream(cluster):
        ...             state = aggregator.init(None)
        ...             means.append(aggregator.aggregate(state, updates, None)[0])
        ...     return means
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
