"""Pseudo-random permutations computed per index, so that a shuffle needs no memory and no state.

A permutation is a balanced Feistel network over the smallest even number of bits that holds the
sequence, applied again to values that fall outside the sequence (cycle walking). It depends on its
arguments alone and not on a library's generator, so a stream is the same with every version of
Python and NumPy, and its position is a number. (grain's `index_shuffle` does the same over at least
16 bits: one element of a sequence of 14 took 6 ms.)

Reference:
    Black, Rogaway. Ciphers with Arbitrary Finite Domains. CT-RSA 2002, section 4.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpax.errors import ArgumentTypeError

_FEISTEL_ROUNDS = 8


def hash_key(*numbers: ArrayLike) -> NDArray[np.uint64]:
    """Hash integers, modulo 2**64 and broadcast, to uint64 keys for `shuffled_index`."""
    # At least one axis: NumPy warns of overflow in scalars, but wrapping around is intended.
    arrays = [np.atleast_1d(np.asarray(number)) for number in numbers]
    for array in arrays:
        if array.dtype.kind not in "iub":
            raise ArgumentTypeError(
                f"A random seed or the number of a round is {array.flat[0]!r:.80}, expected an "
                "integer of at most 64 bits. Give another one, such as 0."
            )
    arrays = [array.astype(np.uint64) for array in arrays]
    key = np.zeros(1, np.uint64)
    for array in arrays:
        key = _mix(key ^ array)
    return key.reshape(np.broadcast_shapes(*(np.shape(number) for number in numbers)))


def shuffled_index(index: ArrayLike, size: ArrayLike, key: ArrayLike) -> NDArray[np.int64]:
    """Return the elements at given positions of a shuffled sequence 0, ..., size - 1."""
    # For each size and key, `i -> shuffled_index(i, size, key)` is a permutation. All three are
    # broadcast.
    arrays = (np.asarray(argument, np.uint64) for argument in (index, size, key))
    value, sizes, keys = (np.array(array) for array in np.broadcast_arrays(*arrays))
    shape = value.shape
    value, sizes, keys = value.ravel(), sizes.ravel(), keys.ravel()
    # Half the bits of the network's domain: the smallest number with 4**half >= size.
    half = ((np.ceil(np.log2(np.maximum(sizes, 2))) + 1) // 2).astype(np.uint64)
    schedule, run = _key_schedule(keys)
    width = 1 << int(half.max(initial=0))
    if len(schedule[0]) * width <= len(value):  # short sequences: few inputs of the hash function
        halves = np.arange(width, dtype=np.uint64)
        schedule = [_mix(keys[:, None] ^ halves).ravel() for keys in schedule]
        run = run * width
    else:
        width = 0
    outside = np.flatnonzero(sizes > 1)
    while len(outside):
        value[outside] = _feistel(value[outside], half[outside], schedule, run[outside], width > 0)
        outside = outside[value[outside] >= sizes[outside]]
    return value.reshape(shape).astype(np.int64)


def _key_schedule(keys: NDArray[np.uint64]) -> tuple[list[NDArray[np.uint64]], NDArray[np.int64]]:
    """Return the key of each round, by run of equal keys, and the run of each key."""
    is_first = np.ones(len(keys), np.bool_)
    is_first[1:] = keys[1:] != keys[:-1]
    key, schedule = keys[is_first], []
    for _ in range(_FEISTEL_ROUNDS):
        key = _mix(key)
        schedule.append(key)
    return schedule, np.cumsum(is_first) - 1


def _feistel(
    value: NDArray[np.uint64],
    half: NDArray[np.uint64],
    schedule: list[NDArray[np.uint64]],
    run: NDArray[np.int64],
    is_hashed: bool,
) -> NDArray[np.uint64]:
    """Permute the integers of 2 * half bits."""
    # The schedule has the keys of each run. If it is hashed: their hashes with all right halves.
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for keys in schedule:
        if is_hashed:
            mixed = keys.take(run + right.view(np.int64))
        else:
            mixed = keys[run]
            mixed ^= right
            mixed = _mix_in_place(mixed)
        mixed &= mask
        mixed ^= left
        left, right = right, mixed
    return (left << half) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's output function, a bijection; each output bit depends on all inputs."""
    return _mix_in_place(x.copy())


def _mix_in_place(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Large arrays: an operation in place takes a third of the time of one that allocates.
    x += np.uint64(0x9E3779B97F4A7C15)  # wraps around
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(x, np.uint64(27), out=shifted)
    x ^= shifted
    x *= np.uint64(0x94D049BB133111EB)
    np.right_shift(x, np.uint64(31), out=shifted)
    x ^= shifted
    return x
