"""A mean of updates in a few bits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedpax.aggregators.aggregator import (
    Aggregator,
    Weights,
    check_floats,
    count_all,
    normalized_weights,
    num_participants,
    select,
)
from fedpax.aggregators.sent_values import mark_sent
from fedpax.checks import IntRange, check_argument
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_broadcast, federated_map, federated_mean, federated_sum

LEVELS = IntRange(least=2, most=256)
"""The numbers of quantization levels."""


class QuantizedMeanState(NamedTuple):
    """The state of `quantized_mean`."""

    # as in `CompressedMeanState`
    residual: chex.ArrayTree


def quantized_mean(num_levels: int) -> Aggregator:
    """Average updates that are quantized to a few levels, with error feedback.

    With L levels and n participants, participant i quantizes its update x_i plus its residual e_i,
    and keeps the quantization error as its new residual:

        c_i = x_i + e_i;   k_i = clip(round(c_i / s + (L - 1) / 2), 0, L - 1);
        q_i = s (k_i - (L - 1) / 2);   e_i <- c_i - q_i;   mean = sum_i q_i / n.

    The error telescopes, as in `compressed_mean`: use it with a fixed set of participants. All
    share the step s of a leaf, the optimum for a normal distribution with their mean of |c_i|.

    The integers k_i are sent and summed: an entry is a digit in base n (L - 1) + 1 of a 32-bit
    word.

    With weights w_i, x_i is scaled by n w_i / sum_i w_i before quantization. A participant of
    weight 0 is absent, and keeps its residual. The derivative is zero.

    Args:
        num_levels: L, number of values of an entry on the wire, 2 to 256.

    Returns:
        An aggregator with state `QuantizedMeanState` and no metrics. The mean is computed in
        float32 and has the dtype of the updates. Updates that are not floats raise a `TypeError`,
        and sums of codes beyond 32 bits a `ValueError`.

    Raises:
        TypeError: `num_levels` is not an int.
        ValueError: `num_levels` is out of range.

    Example:
        >>> import fedpax
        >>> signs = quantized_mean(num_levels=2)
        >>> @fedpax.program(islands=2)
        ... def average(updates):
        ...     state = signs.init(jnp.zeros(3))
        ...     mean, state, metrics = signs.aggregate(state, updates, None)
        ...     return mean, state.residual
        >>> mean, residual = average(jnp.array([[3.0, -1.0, 2.0], [1.0, -2.0, -3.0]]))
        >>> mean.round(2).tolist()  # s is twice the mean of |x|, 4: each entry sent is 2 or -2
        [2.0, -2.0, 0.0]
        >>> (residual.round(2) + 0.0).tolist()
        [[1.0, 1.0, 0.0], [-1.0, 0.0, -1.0]]

    Reference:
        Seide et al., Interspeech 2014, section 3 (error feedback). Mishchenko et al., IntSGD,
        arXiv:2102.08374, algorithm 1. Max, IRE Transactions on Information Theory, 1960.
    """
    remedy = "Use 2 to send signs, and compressed_mean(codecs.float32()) for exact values."
    num_levels = check_argument("quantized_mean", "num_levels", num_levels, LEVELS, remedy=remedy)

    def init(params: chex.ArrayTree) -> QuantizedMeanState:
        zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros_like(x, jnp.float32))
        return QuantizedMeanState(federated_map(zeros, federated_broadcast(params)))

    def aggregate(
        state: QuantizedMeanState, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, QuantizedMeanState, dict[str, jax.Array]]:
        check_floats("quantized_mean", updates)
        if not jax.tree.leaves(updates):
            return updates, state, {}
        shares = None if weights is None else normalized_weights(weights)
        mean, residual = _quantize_and_average(updates, state.residual, shares, num_levels)
        return mean, QuantizedMeanState(residual), {}

    return Aggregator(init, aggregate, needs_all=True)


def _quantize_and_average(
    updates: chex.ArrayTree,
    residual: chex.ArrayTree,
    shares: Float[Array, " participants"] | None,
    num_levels: int,
) -> tuple[chex.ArrayTree, chex.ArrayTree]:
    """Return the mean of the quantized updates, and the participants' new residuals."""
    middle = (num_levels - 1) / 2
    here = None if shares is None else federated_map(lambda share: share != 0, shares)
    # Shares are relative to all participants, also if some do not answer.
    count = count_all() if shares is None else num_participants()
    num_present = count if here is None else federated_sum(here)

    def add_residual(
        update: chex.ArrayTree, residual: chex.ArrayTree, share: Float[Array, ""] | None
    ) -> chex.ArrayTree:
        if share is None:
            return jax.tree.map(lambda x, e: x.astype(jnp.float32) + e, update, residual)
        update = select(share != 0, update, jnp.float32)
        return jax.tree.map(lambda x, e: x * share + e, update, residual)

    def mean_magnitudes(unsent: chex.ArrayTree) -> Float[Array, " leaves"]:
        return jnp.stack([jnp.mean(jnp.abs(c)) for c in jax.tree.leaves(unsent)])

    def by_leaf(steps: Float[Array, " leaves"]) -> chex.ArrayTree:
        return jax.tree.unflatten(jax.tree.structure(updates), list(steps))

    unsent = federated_map(add_residual, updates, residual, shares)
    magnitudes = federated_mean(federated_map(mean_magnitudes, unsent), here)
    steps = _best_step(num_levels) * magnitudes

    def encode(c: jax.Array, step: jax.Array) -> jax.Array:
        # A step of 0 means that every entry is 0; a NaN in an entry makes the step NaN.
        place = jnp.where(step == 0, 0.0, c / step)
        return jnp.clip(jnp.round(place + middle), 0, num_levels - 1)

    def send(
        unsent: chex.ArrayTree, present: Bool[Array, ""] | None
    ) -> tuple[chex.ArrayTree, chex.ArrayTree]:
        codes = jax.tree.map(encode, unsent, by_leaf(steps))
        left = jax.tree.map(lambda c, s, k: c - s * (k - middle), unsent, by_leaf(steps), codes)
        if present is not None:  # an absent participant's unsent part is its residual
            left = jax.tree.map(lambda new, old: jnp.where(present, new, old), left, unsent)
            codes = select(present, codes)
        words = jax.tree.map(pack, codes, packings)
        return mark_sent(words, instead_of=unsent), left

    def receive(step: jax.Array, words: jax.Array, leaf: jax.Array, packing: Packing) -> jax.Array:
        total = unpack(words, packing, leaf.shape[1:]).astype(jnp.float32)
        mean = step * (total / count - middle * (num_present / count))
        return mean.astype(leaf.dtype)

    packings = jax.tree.map(
        lambda leaf: choose_packing(
            leaf.shape[1:], leaf.shape[0], num_levels, shards_per_axis(leaf)[1:]
        ),
        updates,
    )
    words, residual = federated_map(send, unsent, here)
    return jax.tree.map(receive, by_leaf(steps), federated_sum(words), updates, packings), residual


@functools.cache
def _best_step(num_levels: int) -> float:
    """Return the step of least squared error for a normal distribution with mean |c| of 1."""
    sigma, middle = math.sqrt(math.pi / 2), (num_levels - 1) / 2
    values = [sigma * i / 200 for i in range(1200)]  # up to six standard deviations
    density = [math.exp(-((c / sigma) ** 2) / 2) for c in values]

    def squared_error(step: float) -> float:
        codes = [min(round(c / step + middle), num_levels - 1) for c in values]
        left = [c - step * (k - middle) for c, k in zip(values, codes, strict=True)]
        return sum(p * e * e for p, e in zip(density, left, strict=True))

    # Golden-section search: the error is unimodal in the step.
    low, high, ratio = 4 / num_levels**1.1, 4 / num_levels**0.7, (math.sqrt(5) - 1) / 2
    while high - low > 1e-4 * high:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if squared_error(left) < squared_error(right):
            high = right
        else:
            low = left
    return (low + high) / 2


# ---- pack the integer codes of a leaf into 32-bit words whose sums are the sums of the codes

WORD = 2**32


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Packing:
    """The layout of a leaf's codes in words: adjacent entries of one axis are digits of a word."""

    base: int  # one more than the largest possible sum of codes
    axis: int | None  # the axis of the leaf that is packed; None for a scalar
    entries_per_word: int


def choose_packing(
    shape: tuple[int, ...],
    participants: int,
    num_levels: int,
    shards: tuple[int, ...] | None = None,
) -> Packing:
    """Choose the packing with the fewest words."""
    # Among equal packings, more factors of 2 in the number of words let the words stay sharded. A
    # word never spans two shards, which explicit mesh axes alone tell.
    base = participants * (num_levels - 1) + 1
    most = next((d for d in range(32, 0, -1) if base**d <= WORD), 0)
    if not most:
        raise ArgumentError(
            f"num_levels is {num_levels}, but the sum of {participants:,} participants' codes of "
            "that many levels does not fit a 32-bit word. Use fewer levels."
        )
    if not shape or 0 in shape:
        return Packing(base, None, 1)

    def cost(axis_and_entries: tuple[int, int]) -> tuple[float, int]:
        axis, entries_per_word = axis_and_entries
        words = -(-shape[axis] // entries_per_word)
        # Words that divide the axis keep its sharding, which is worth up to half the density.
        padded = 2 if words * entries_per_word != shape[axis] else 1
        return padded * words / shape[axis], -(words & -words)

    def whole_words(axis_and_entries: tuple[int, int]) -> bool:
        axis, entries_per_word = axis_and_entries
        over = 1 if shards is None else shards[axis]
        return over == 1 or entries_per_word == 1 or shape[axis] % (over * entries_per_word) == 0

    choices = itertools.product(range(len(shape)), range(1, most + 1))
    axis, entries_per_word = min(filter(whole_words, choices), key=cost)
    return Packing(base, axis, entries_per_word)


def shards_per_axis(leaf: jax.Array) -> tuple[int, ...]:
    """Return the number of devices that each axis of a leaf is sharded over, by its type."""
    sharding = jax.typeof(leaf).sharding
    names = [(axes,) if isinstance(axes, str) else axes or () for axes in sharding.spec]
    return tuple(math.prod(sharding.mesh.shape[name] for name in axes) for axes in names)


def pack(codes: jax.Array, packing: Packing) -> jax.Array:
    """Pack the codes of one participant into uint32 words."""
    codes = codes.astype(jnp.uint32)
    axis, entries_per_word = packing.axis, packing.entries_per_word
    if axis is None or entries_per_word == 1:
        return codes
    words = -(-codes.shape[axis] // entries_per_word)
    padding = [
        (0, words * entries_per_word - size if i == axis else 0)
        for i, size in enumerate(codes.shape)
    ]
    if any(after for _, after in padding):
        codes = jnp.pad(codes, padding)
    split = codes.reshape(*codes.shape[:axis], words, entries_per_word, *codes.shape[axis + 1 :])
    return jnp.sum(split * _powers(packing, split.ndim), axis + 1, jnp.uint32)


def unpack(words: jax.Array, packing: Packing, shape: tuple[int, ...]) -> jax.Array:
    """Unpack sums of words into sums of codes, an array of `shape`."""
    axis, entries_per_word = packing.axis, packing.entries_per_word
    if axis is None or entries_per_word == 1:
        return words
    split = jnp.expand_dims(words, axis + 1)
    split = split // _powers(packing, split.ndim) % jnp.uint32(packing.base)
    whole = split.reshape(
        *words.shape[:axis], words.shape[axis] * entries_per_word, *words.shape[axis + 1 :]
    )
    return jax.lax.slice_in_dim(whole, 0, shape[axis], axis=axis)


def _powers(packing: Packing, ndim: int) -> jax.Array:
    """Return the powers of the base of a word's digits, along the axis after the words."""
    powers = jnp.array([packing.base**i for i in range(packing.entries_per_word)], jnp.uint32)
    return powers.reshape(-1, *[1] * (ndim - 2 - (packing.axis or 0)))
