"""Pseudo-random permutations computed per index: a shuffle without memory and state.

A balanced Feistel network with cycle walking (Black, Rogaway, CT-RSA 2002, section 4), the same in
every version of Python and NumPy.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpax.errors import ArgumentTypeError

_FEISTEL_ROUNDS = 8
_WORD_HALF = np.uint64(3)  # up to here, the hashes of all right halves fit a 32-bit word


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
    is_first = np.ones(len(keys), np.bool_)
    is_first[1:] = (keys[1:] != keys[:-1]) | (sizes[1:] != sizes[:-1])
    sequence = np.cumsum(is_first) - 1
    return shuffled_in(sequence, value, sizes[is_first], keys[is_first]).reshape(shape)


def shuffled_in(
    sequence: NDArray[np.int64],
    index: NDArray[np.integer],
    sizes: NDArray[np.integer],
    keys: NDArray[np.uint64],
) -> NDArray[np.int64]:
    """Return `shuffled_index(index, sizes[sequence], keys[sequence])`, in less time."""
    # Half the bits of the network's domain: the smallest number with 4**half >= size.
    half = ((np.ceil(np.log2(np.maximum(sizes, 2))) + 1) // 2).astype(np.uint64)
    width = 1 << int(half.max(initial=0))
    schedule = []  # the keys of each round
    for _ in range(_FEISTEL_ROUNDS):
        keys = _mix(keys)
        schedule.append(keys)
    parts: list[Any] = []  # of the sequences, which have tables of all outputs of the network
    if len(half) * width**2 <= max(4 * len(index), 2**12):  # few elements take as long as tables
        parts = [slice(None)]
    elif np.sum(4.0 ** (rounded := np.maximum(half, _WORD_HALF))) <= 4 * len(index):
        parts = [rounded == bits for bits in np.unique(rounded)]
    if parts:
        tables, begin, end = [], np.empty(len(half), np.int64), 0
        for part in parts:
            width = 1 << int(half[part].max(initial=0))
            outputs = _outputs(half[part], width, [keys[part] for keys in schedule]).ravel()
            begin[part] = np.arange(end, end + len(outputs), width**2)
            end += len(outputs)
            tables.append(outputs)
        table = np.concatenate(tables)
        first = begin.take(sequence)
        last = (np.maximum(sizes, 1) - 1).astype(table.dtype).take(sequence)
        shuffled = value = table.take(first + index.astype(np.int64, copy=False))
        at = left = np.flatnonzero(value > last)
        while len(left):  # until the outputs of a sequence are within it
            first, last, value = (x.take(left) for x in (first, last, value))
            value = table.take(first + value)
            shuffled[at] = value
            left = np.flatnonzero(value > last)
            at = at.take(left)
        return shuffled.astype(np.int64)
    if len(half) * width <= 4 * len(index):  # few inputs of the hash function
        dtype = _narrow(width)
        hashes, stride = _hash_tables(half, width, schedule, dtype), width
    else:
        dtype, hashes, stride = np.uint64, [_hash(keys) for keys in schedule], 1
    value, sizes, half = index.astype(dtype), sizes.astype(dtype)[sequence], half.astype(dtype)
    outside = np.flatnonzero(sizes > 1)
    while len(outside):
        of = sequence[outside] if len(half) > 1 else sequence[:1]
        value[outside] = _feistel(value[outside], half[of], hashes, of * stride)
        outside = outside[value[outside] >= sizes[outside]]
    return value.astype(np.int64)


def _narrow(width: int) -> Any:
    """Return a type for sizes of at most width**2."""
    return np.uint16 if width < 2**8 else np.uint32 if width < 2**16 else np.int64


def _outputs(
    half: NDArray[np.uint64], width: int, schedule: list[NDArray[np.uint64]]
) -> NDArray[Any]:
    """Return the network's outputs, narrow integers, for all inputs, `[sequences, width**2]`."""
    if width <= 8:
        return _outputs_of_words(half.astype(np.uint32), width, schedule)
    dtype = _narrow(width)
    bits = half.astype(dtype)[:, None]
    inputs = np.arange(width**2, dtype=dtype) & (dtype(1) << dtype(2) * bits) - dtype(1)
    hashes = _hash_tables(half, width, schedule, dtype)
    return _feistel(inputs, bits, hashes, width * np.arange(len(half))[:, None])


def _outputs_of_words(
    half: NDArray[np.uint32], width: int, schedule: list[NDArray[np.uint64]]
) -> NDArray[np.uint8]:
    """Look up the hashes of at most 8 right halves in the bits of one word for each sequence."""
    rights, inputs = np.arange(width)[:, None], np.arange(width**2, dtype=np.uint32)[:, None]
    bits, mask = np.array(width.bit_length() - 1, np.uint32), np.array(width - 1, np.uint32)
    keyed, shifts = rights.astype(np.uint64), bits * rights.astype(np.uint32)
    own_mask = (np.uint32(1) << half) - np.uint32(1)
    left, right = inputs >> half, inputs & own_mask
    mixed = np.empty_like(left)  # in the same memory in each round
    for keys in schedule:
        hashes = _mix_in_place(keys ^ keyed).astype(np.uint32)
        hashes &= own_mask
        hashes <<= shifts
        np.multiply(right, bits, out=mixed)
        np.right_shift(np.bitwise_or.reduce(hashes), mixed, out=mixed)
        mixed &= mask
        mixed ^= left
        left, right, mixed = right, mixed, left
    left <<= half
    left |= right
    return left.astype(np.uint8).T


_Hash = Callable[[NDArray[Any], NDArray[np.int64], NDArray[Any]], NDArray[Any]]
"""Hash right halves, to a new array, given where the keys or the table of their sequence begin, and
the mask of a half's bits."""


def _hash(keys: NDArray[np.uint64]) -> _Hash:
    def hashed(
        right: NDArray[Any], sequence: NDArray[np.int64], mask: NDArray[Any]
    ) -> NDArray[Any]:
        mixed = _mix_in_place(keys[sequence] ^ right)
        mixed &= mask
        return mixed

    return hashed


def _hash_tables(
    half: NDArray[np.uint64], width: int, schedule: list[NDArray[np.uint64]], dtype: Any
) -> list[_Hash]:
    """Look up hashes of fewer than `width` right halves."""
    right = np.arange(width, dtype=np.uint64)
    mask = ((np.uint64(1) << half) - np.uint64(1))[:, None]

    def look_up(keys: NDArray[np.uint64]) -> _Hash:
        hashes = _mix(keys[:, None] ^ right)
        hashes &= mask
        table = hashes.ravel().astype(dtype)
        if len(keys) == 1:
            return lambda right, first, mask: table.take(right)
        return lambda right, first, mask: table.take(first + right)

    return [look_up(keys) for keys in schedule]


def _feistel(
    value: NDArray[Any], half: NDArray[Any], hashes: list[_Hash], place: NDArray[np.int64]
) -> NDArray[Any]:
    """Permute the integers of 2 * half bits."""
    one = value.dtype.type(1)
    mask = (one << half) - one
    left, right = value >> half, value & mask
    for hashed in hashes:
        mixed = hashed(right, place, mask)
        mixed ^= left
        left, right = right, mixed
    return (left << half) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's output function, a bijection; each output bit depends on all inputs."""
    if x.size != 1:
        return _mix_in_place(x.copy())
    y = x.item() + int(_STEP) & _WORD  # one integer: a fifth of the time of an array
    y = (y ^ y >> 30) * int(_FIRST) & _WORD
    y = (y ^ y >> 27) * int(_SECOND) & _WORD
    return np.full_like(x, y ^ y >> 31)


_WORD = 2**64 - 1
# Arrays without axes: ufuncs convert a scalar, which takes as long as a thousand additions.
_STEP, _FIRST, _SECOND = (
    np.array(number, np.uint64)
    for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_SHIFTS = tuple(np.array(bits, np.uint64) for bits in (30, 27, 31))


def _mix_in_place(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Large arrays: an operation in place takes a third of the time of one that allocates.
    x += _STEP  # wraps around
    shifted = x >> _SHIFTS[0]
    x ^= shifted
    x *= _FIRST
    np.right_shift(x, _SHIFTS[1], out=shifted)
    x ^= shifted
    x *= _SECOND
    np.right_shift(x, _SHIFTS[2], out=shifted)
    x ^= shifted
    return x
