"""Pseudo-random permutations computed per index, so that a shuffle needs no memory and no state.

A permutation is a balanced Feistel network over the smallest even number of bits that holds the
sequence, applied again to values that fall outside the sequence (cycle walking). It depends on its
arguments alone and not on a library's generator, so a stream is the same with every version of
Python and NumPy, and its position is a number. (grain's `index_shuffle` does the same over at least
16 bits: one element of a sequence of 14 took 6 ms.)

Reference:
    Black, Rogaway. Ciphers with Arbitrary Finite Domains. CT-RSA 2002, section 4.
"""

from typing import Any, NamedTuple

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
    value, sizes, keys = np.broadcast_arrays(*arrays)
    shape = value.shape
    value, sizes, keys = value.ravel(), sizes.ravel(), keys.ravel()
    runs, run = _runs(sizes, keys)
    schedule, width = runs.schedule, 1 << int(runs.half.max(initial=0))
    if len(runs.half) * width <= len(value):  # short sequences: few inputs of the hash function
        halves = np.arange(width, dtype=np.uint64)
        # Holds sizes: at most width**2. NumPy adds uint64 and `run`, an int64, as floats.
        narrow = np.uint16 if width < 2**8 else np.uint32 if width < 2**16 else np.int64
        hashes = [_mix(keys[:, None] ^ halves).ravel() for keys in schedule]
        schedule = [(hashed & np.uint64(width - 1)).astype(narrow) for hashed in hashes]
        value, sizes = value.astype(narrow), sizes.astype(narrow)
    else:
        width, value = 0, value.copy()
    half, first = runs.half.astype(value.dtype), np.arange(len(runs.half)) * max(width, 1)
    if width and len(half) * width**2 <= 4 * len(value):  # each input of the network at once
        last = (np.uint64(1) << 2 * runs.half[:, None]) - np.uint64(1)
        inputs = (np.arange(width**2, dtype=np.uint64) & last).astype(value.dtype)
        table = _feistel(inputs, half[:, None], schedule, first[:, None], True).ravel()
        place = run * width**2
        value = table.take(place + value)
        outside = np.flatnonzero((value >= sizes) & (sizes > 0))
        while len(outside):
            value[outside] = table.take(place[outside] + value[outside])
            outside = outside[value[outside] >= sizes[outside]]
        return value.reshape(shape).astype(np.int64)
    outside = np.flatnonzero(sizes > 1)
    while len(outside):
        of = run[outside]
        value[outside] = _feistel(value[outside], half[of], schedule, first[of], width > 0)
        outside = outside[value[outside] >= sizes[outside]]
    return value.reshape(shape).astype(np.int64)


class _Runs(NamedTuple):
    """Runs of elements with equal sizes and keys."""

    # Half the bits of the network's domain: the smallest number with 4**half >= size.
    half: NDArray[np.uint64]
    schedule: list[NDArray[np.uint64]]  # the keys of each round


def _runs(sizes: NDArray[np.uint64], keys: NDArray[np.uint64]) -> tuple[_Runs, NDArray[np.int64]]:
    """Return the runs of equal sizes and keys, and the run of each element."""
    is_first = np.ones(len(keys), np.bool_)
    is_first[1:] = (keys[1:] != keys[:-1]) | (sizes[1:] != sizes[:-1])
    half = (np.ceil(np.log2(np.maximum(sizes[is_first], 2))) + 1) // 2
    key, schedule = keys[is_first], []
    for _ in range(_FEISTEL_ROUNDS):
        key = _mix(key)
        schedule.append(key)
    return _Runs(half.astype(np.uint64), schedule), np.cumsum(is_first) - 1


def _feistel(
    value: NDArray[Any],
    half: NDArray[Any],
    schedule: list[NDArray[Any]],
    run: NDArray[np.int64],
    is_hashed: bool,
) -> NDArray[Any]:
    """Permute the integers of 2 * half bits."""
    # The schedule has the keys of each run. If it is hashed: their hashes with all right halves.
    one = value.dtype.type(1)
    mask = (one << half) - one
    left, right = value >> half, value & mask
    for keys in schedule:
        if is_hashed:
            mixed = keys.take(run + right)
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
