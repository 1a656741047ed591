"""Means whose values cross in a few bits: quantized, added up as integers, with error feedback."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from fedpax.primitives import federated_map, federated_mean, federated_sum

WORD = 2**32


def quantized_mean(x: Any, error: Any, *, levels: int) -> tuple[Any, Any]:
    """Averages over the participants of a program, each of whom sends one of a few levels.

    Participant i quantizes what it has and what it still owes, and keeps what that leaves out:

        c_i = x_i + e_i;   k_i = clip(round(c_i / s + (L - 1) / 2), 0, L - 1);
        q_i = s (k_i - (L - 1) / 2);   e_i <- c_i - q_i;   mean = sum_i q_i / n.

    So nothing is lost, only late: over any number of rounds the means sum up to those of x, but for
    the mean of the errors that are left. The step s is common to all participants, one number a
    leaf: the best for a normal distribution of the participants' mean of |c_i|. It crosses first.

    Then the integers k_i cross, not the floats q_i. As all have the same s, they add up: a word of
    32 bits holds as many digits as fit with room for the sum, in base n (L - 1) + 1. Four
    participants with two levels share a word among 13 values, with four levels among 8. Digits
    come from one axis of a leaf, which they divide if they can, so that a leaf that is sharded
    over the model's mesh axes stays so. It is an ordinary `federated_sum` of words, on any mesh.

    The derivative is zero, as rounding's is.

    Args:
        x: a pytree of float arrays `[n, ...]`, placed.
        error: float32 arrays of the same shapes, placed: what was left out so far; zeros at first.
        levels: how many values a participant can send, L, from 2 to 256. With 2 it sends signs.

    Returns:
        The mean, a server value with float32 leaves `[...]`, and the participants' new errors.

    Raises:
        RuntimeError: outside of a program.
        TypeError: a leaf that is no float.
        ValueError: levels out of range, or more of them than a word holds for so many participants.

    Example:
        >>> import fedpax
        >>> @fedpax.program(islands=2)
        ... def signs(x, error):
        ...     return quantized_mean(x, error, levels=2)
        >>> x = jnp.array([[3.0, -1.0, 2.0], [1.0, -2.0, -3.0]])
        >>> mean, error = signs(x, jnp.zeros((2, 3)))
        >>> mean.round(2).tolist()  # s is twice the mean of |x|, 4: all send 2 or -2
        [2.0, -2.0, 0.0]
        >>> (error.round(2) + 0.0).tolist()
        [[1.0, 1.0, 0.0], [-1.0, 0.0, -1.0]]

    Reference:
        Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
        Distributed Training of Speech DNNs, Interspeech 2014, section 3 (error feedback).
        Mishchenko et al., IntSGD: Adaptive Floatless Compression of Stochastic Gradients,
        arXiv:2102.08374, algorithm 1 (one step size for all, sums of integers).
        Max, Quantizing for Minimum Distortion, IRE Transactions on Information Theory, 1960.
    """
    check_levels(levels)
    for path, leaf in jax.tree.leaves_with_path(x):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"quantized_mean(): x{jax.tree_util.keystr(path)} has dtype "
                f"{jnp.result_type(leaf)}, expected floats. Use federated_mean() for others."
            )
    if not jax.tree.leaves(x):
        return x, error
    middle = (levels - 1) / 2

    def owe(x: Any, error: Any) -> tuple[Any, jax.Array]:
        owed = jax.tree.map(lambda x, e: x.astype(jnp.float32) + e, x, error)
        return owed, jnp.stack([jnp.mean(jnp.abs(c)) for c in jax.tree.leaves(owed)])

    owed, magnitudes = federated_map(owe, x, error)
    best = list(_best_step(levels) * federated_mean(magnitudes))
    steps = jax.tree.unflatten(jax.tree.structure(x), best)

    def code(c: jax.Array, step: jax.Array) -> jax.Array:
        # A step of 0 comes with zeros alone, and a NaN among them with a step of NaN.
        place = jnp.where(step == 0, 0.0, c / step)
        return jnp.clip(jnp.round(place + middle), 0, levels - 1)

    def send(owed: Any) -> tuple[Any, Any]:
        codes = jax.tree.map(code, owed, steps)
        error = jax.tree.map(lambda c, s, k: c - s * (k - middle), owed, steps, codes)
        return jax.tree.map(lambda k, p: _pack(k, p), codes, packings), error

    def receive(step: jax.Array, words: jax.Array, leaf: jax.Array, packing: Packing) -> jax.Array:
        total = _unpack(words, packing, leaf.shape[1:]).astype(jnp.float32)
        return step * (total / leaf.shape[0] - middle)

    packings = jax.tree.map(
        lambda leaf: packing_of(leaf.shape[1:], leaf.shape[0], levels, _shards(leaf)[1:]), x
    )
    words, error = federated_map(send, owed)
    return jax.tree.map(receive, steps, federated_sum(words), x, packings), error


def check_levels(levels: int) -> None:
    """Refuses a number of levels that nothing can be rounded to."""
    if isinstance(levels, bool) or not isinstance(levels, int):
        raise TypeError(f"levels is {levels!r}, expected an int from 2 to 256, or None.")
    if not 2 <= levels <= 256:
        raise ValueError(f"levels is {levels}, expected 2 (signs) to 256, or None for floats.")


@functools.cache
def _best_step(levels: int) -> float:
    """The step of least squared error for a normal distribution whose mean of |c| is 1."""
    sigma, middle = math.sqrt(math.pi / 2), (levels - 1) / 2
    values = [sigma * i / 200 for i in range(1200)]  # up to six standard deviations
    density = [math.exp(-((c / sigma) ** 2) / 2) for c in values]

    def squared_error(step: float) -> float:
        codes = [min(round(c / step + middle), levels - 1) for c in values]
        left = [c - step * (k - middle) for c, k in zip(values, codes, strict=True)]
        return sum(p * e * e for p, e in zip(density, left, strict=True))

    # Golden sections: the error falls, and then rises.
    low, high, ratio = 4 / levels**1.1, 4 / levels**0.7, (math.sqrt(5) - 1) / 2
    while high - low > 1e-4 * high:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if squared_error(left) < squared_error(right):
            high = right
        else:
            low = left
    return (low + high) / 2


# ---- words of several digits


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Packing:
    """How the codes of a leaf become words, digits of one axis to a word.

    Attributes:
        base: of the digits: one more than the largest sum of codes.
        axis: which axis of the leaf is cut into words; None for a scalar.
        digits: how many of its values share a word.
    """

    base: int
    axis: int | None
    digits: int


def packing_of(
    shape: tuple[int, ...], participants: int, levels: int, shards: tuple[int, ...] | None = None
) -> Packing:
    """The packing of the fewest words; among equals that which most powers of two divide.

    So an axis that is sharded, of which only types of explicit mesh axes tell, can stay so: its
    words can mostly be dealt out to as many devices. A shard is not cut within a word.
    """
    base = participants * (levels - 1) + 1
    most = next((d for d in range(32, 0, -1) if base**d <= WORD), 0)
    if not most:
        raise ValueError(
            f"The sum of {participants:,} participants' codes of {levels} levels does not fit a "
            "word of 32 bits: take fewer levels."
        )
    if not shape or 0 in shape:
        return Packing(base, None, 1)

    def cost(axis_and_digits: tuple[int, int]) -> tuple[float, int]:
        axis, digits = axis_and_digits
        words = -(-shape[axis] // digits)
        # What divides an axis leaves its shards alone, which is worth up to half the density.
        padded = 2 if words * digits != shape[axis] else 1
        return padded * words / shape[axis], -(words & -words)

    def whole_words(axis_and_digits: tuple[int, int]) -> bool:
        axis, digits = axis_and_digits
        over = 1 if shards is None else shards[axis]
        return over == 1 or digits == 1 or shape[axis] % (over * digits) == 0

    choices = itertools.product(range(len(shape)), range(1, most + 1))
    axis, digits = min(filter(whole_words, choices), key=cost)
    return Packing(base, axis, digits)


def _shards(leaf: jax.Array) -> tuple[int, ...]:
    """How many devices each axis is known to be cut over."""
    sharding = jax.typeof(leaf).sharding
    names = [(axes,) if isinstance(axes, str) else axes or () for axes in sharding.spec]
    return tuple(math.prod(sharding.mesh.shape[name] for name in axes) for axes in names)


def _pack(codes: jax.Array, packing: Packing) -> jax.Array:
    codes = codes.astype(jnp.uint32)
    axis, digits = packing.axis, packing.digits
    if axis is None or digits == 1:
        return codes
    words = -(-codes.shape[axis] // digits)
    padding = [(0, words * digits - size if i == axis else 0) for i, size in enumerate(codes.shape)]
    if any(after for _, after in padding):
        codes = jnp.pad(codes, padding)
    split = codes.reshape(*codes.shape[:axis], words, digits, *codes.shape[axis + 1 :])
    return jnp.sum(split * _powers(packing, split.ndim), axis + 1, jnp.uint32)


def _unpack(words: jax.Array, packing: Packing, shape: tuple[int, ...]) -> jax.Array:
    axis, digits = packing.axis, packing.digits
    if axis is None or digits == 1:
        return words
    split = jnp.expand_dims(words, axis + 1)
    split = split // _powers(packing, split.ndim) % jnp.uint32(packing.base)
    whole = split.reshape(*words.shape[:axis], words.shape[axis] * digits, *words.shape[axis + 1 :])
    return jax.lax.slice_in_dim(whole, 0, shape[axis], axis=axis)


def _powers(packing: Packing, ndim: int) -> jax.Array:
    """The weights of a word's digits, along the axis behind the words'."""
    powers = jnp.array([packing.base**i for i in range(packing.digits)], jnp.uint32)
    return powers.reshape(-1, *[1] * (ndim - 2 - (packing.axis or 0)))
