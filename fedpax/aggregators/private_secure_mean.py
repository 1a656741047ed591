"""Distributed differential privacy."""

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fedpax.aggregators.aggregator import (
    Aggregator,
    Weights,
    count_all,
    mean_dtype,
    num_participants,
    present,
)
from fedpax.aggregators.clipping import check_norm, clip_update
from fedpax.aggregators.gaussian_noise import known_sharding
from fedpax.aggregators.privacy_accounting import accountant_of
from fedpax.aggregators.random_numbers import (
    hashed_indices,
    normal_from_words,
    random_normal,
    rehash,
    round_key,
)
from fedpax.aggregators.secure_mean import check_neighbors, engine_sum, most_neighbors, secure_sum
from fedpax.aggregators.sent_values import releases_per_round
from fedpax.checks import COUNT, POSITIVE, check_argument, check_seed
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_sum
from fedpax.primitives.placement import is_for_stages
from fedpax.transforms.marks import own_noise

MOST_DEVIATIONS = 6  # float32 normal numbers stay below
DITHERED_STDDEV = 1000.0  # from here on, dithered normal numbers are accurate, and faster
LEAST_STDDEV = 3.0  # of one participant's noise: the tau of proposition 14 is then below 1e-37 n


class PrivateSecureMeanState(NamedTuple):
    """The state of `private_secure_mean`."""

    round: Int[Array, ""]  # with the seed it determines the noise


def private_secure_mean(
    *,
    max_norm: float,
    noise_multiplier: float,
    seed: int,
    delta: float = 1e-6,
    releases_before: int = 0,
    min_participants: int | None = None,
    num_neighbors: int | None = None,
) -> Aggregator:
    """Average updates with noise from all participants, as integers under masks.

    The server sees the sum alone, which is private. With n participants, clipping norm C, d entries
    and noise multiplier z, participant i sends, under the masks of `secure_mean`, modulo 2^32,

        k_i = round(R u_i / C min(1, C / ||u_i||)) + N_Z(0, s^2 / t),   s = z (R + sqrt(d) / 2),

    where N_Z is the discrete Gaussian distribution, and t is `min_participants`. The mean of m
    present participants is `C / (R m) sum_i k_i`. R is at most 2^20 and as large as the sum
    permits.

    The noise of t participants or more has at least the stated variance. With fewer, the protocol
    aborts: the result is 0. Epsilon is for one participant's update, replaced by 0:
    `privacy_spent(discrete=True, ...)`, without amplification by sampling.

    In one program, this is a simulation, as in `secure_mean`.

    In stages (`fedpax.stages`), each participant that answers draws its noise from the operating
    system instead, and the engine masks the terms. A round with fewer than t answers is repeated or
    fails.

    Args:
        max_norm: C, above 0.
        noise_multiplier: z, above 0.
        seed: int, seed of noise and masks in a simulation. Use another one for any other noise.
        delta: of the metric `"epsilon"`, between 0 and 1. Well below 1 over the number of all
            clients.
        releases_before: as in `private_mean`.
        min_participants: t, at least 1. Default None: n, so that no participant may drop out.
        num_neighbors: as in `secure_mean`.

    Returns:
        An aggregator with state `PrivateSecureMeanState`. Participants of a weight above 0 are
        present, with equal weights. An update whose norm is infinite or NaN counts as 0. The result
        has the dtype of the updates, float32 for integers. Metrics: `"noise_stddev"`, the standard
        deviation of each coordinate of the mean, `"num_present"`, and `"epsilon"`, spent so far. It
        holds for the model, not for other metrics.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; when the program is traced: more participants or
            noise than a 32-bit sum has room for, or fewer than `min_participants`.

    Example:
        >>> import fedpax
        >>> aggregator = private_secure_mean(max_norm=1.0, noise_multiplier=0.5, seed=0)
        >>> @fedpax.program(clients=10)
        ... def average(updates):
        ...     return aggregator.aggregate(aggregator.init(None), updates, None)
        >>> mean, state, metrics = average(jnp.zeros((10, 1000)))
        >>> f"{metrics['noise_stddev']:.3f}", f"{mean.std():.2f}"  # 0.5 / 10
        ('0.050', '0.05')

    Reference:
        Kairouz et al., arXiv:2102.06387, algorithms 1 and 2, proposition 14, without random
        rotation and randomized rounding.
    """
    name = "private_secure_mean"
    max_norm = check_norm(name, "max_norm", max_norm)
    noise_multiplier = check_argument(
        name, "noise_multiplier", noise_multiplier, POSITIVE, remedy="Use secure_mean() for none."
    )
    accountant = accountant_of(name, noise_multiplier, delta, releases_before, discrete=True)
    assert accountant is not None  # there is noise
    num_neighbors = check_neighbors(name, num_neighbors)
    seed = check_seed(name, seed)
    if min_participants is not None:
        remedy = "Use None if no participant may drop out."
        min_participants = check_argument(
            name, "min_participants", min_participants, COUNT, remedy=remedy
        )

    def init(params: chex.ArrayTree) -> PrivateSecureMeanState:
        return PrivateSecureMeanState(jnp.int32(0))

    def aggregate(
        state: PrivateSecureMeanState, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, PrivateSecureMeanState, dict[str, jax.Array]]:
        n = num_participants()
        least = _least_present(n, min_participants)
        num_entries = sum(leaf.size for leaf in jax.tree.leaves(updates)) // n
        resolution = _resolution(n, noise_multiplier, num_entries, least)
        stddev = noise_multiplier * (resolution + math.sqrt(num_entries) / 2)
        local_stddev = stddev / math.sqrt(least)

        def integers(update: chex.ArrayTree) -> chex.ArrayTree:
            clipped, _ = clip_update(update, max_norm)
            return jax.tree.map(
                lambda u: jnp.round(u * (resolution / max_norm)).astype(jnp.int32), clipped
            )

        here = present(weights)
        if is_for_stages():
            noise = own_noise(updates, local_stddev)
            total = engine_sum(integers, updates, here, noise=noise, least=least)
            # A participant of weight 0 that answers adds noise too.
            noises = count_all()
        else:
            noise_key = round_key(seed, "discrete_gaussian", state.round)
            masks_key = round_key(seed, "masks", state.round)

            def encode(update: chex.ArrayTree, index: Int[Array, ""]) -> chex.ArrayTree:
                leaves, structure = jax.tree.flatten(integers(update))
                key = jax.random.fold_in(noise_key, index)
                codes = [
                    leaf + draw_discrete_gaussian(jax.random.fold_in(key, i), leaf, local_stddev)
                    for i, leaf in enumerate(leaves)
                ]
                return jax.tree.unflatten(structure, codes)

            total = secure_sum(name, encode, updates, here, masks_key, num_neighbors)
            noises = federated_sum(here)
        count = federated_sum(here)
        scale = jnp.where(count < least, 0.0, max_norm / resolution / jnp.maximum(count, 1))
        mean = jax.tree.map(lambda t, u: (scale * t).astype(mean_dtype(u)), total, updates)
        metrics = {
            "noise_stddev": scale * local_stddev * jnp.sqrt(noises),
            "num_present": count,
            "epsilon": accountant.epsilon((state.round + 1) * releases_per_round()),
        }
        return mean, PrivateSecureMeanState(state.round + 1), metrics

    def limits(n: int) -> dict[str, int]:
        return {"min_participants": n, "num_neighbors": most_neighbors(n)}

    made = Aggregator(init, aggregate, needs_all=True, accountant=accountant, limits=limits)
    return made._replace(tolerates_non_finite=True, counts_alike=True)


def _least_present(n: int, min_participants: int | None) -> int:
    """Return the least number of participants in a sum; n if none may drop out."""
    if min_participants is not None and min_participants > n:
        raise ArgumentError(
            f"private_secure_mean(): min_participants is {min_participants}, expected at most the "
            f"{n} participants of the round. Use fewer."
        )
    return n if min_participants is None else min_participants


def _resolution(n: int, noise_multiplier: float, num_entries: int, least: int) -> int:
    """Return R, the clipping norm in integers: at most 2^20, and the sum fits an int32."""
    rounding = math.sqrt(num_entries) / 2
    # n R + 10 z' (R + sqrt(d) / 2) < 2^31, where z' is the noise multiplier of n participants.
    deviations = 10 * noise_multiplier * math.sqrt(n / least)
    resolution = min(2**20, int((2**31 - 1 - deviations * rounding) / (n + deviations)))
    local_stddev = noise_multiplier * (resolution + rounding) / math.sqrt(least)
    if resolution < 2 * rounding or local_stddev < LEAST_STDDEV:
        raise ArgumentError(
            f"private_secure_mean(): a 32-bit sum of {n:,} participants with noise_multiplier="
            f"{noise_multiplier} leaves {max(resolution, 0):,} integers for the norm of an update, "
            f"too few for {num_entries:,} entries. Use fewer participants, or private_mean()."
        )
    return resolution


def draw_discrete_gaussian(key: jax.Array, like: jax.Array, stddev: float) -> Int[Array, "..."]:
    """Draw integers k with probabilities proportional to `exp(-k^2 / (2 stddev^2))`."""
    # Below a `stddev` of 1,000, a normal number t is rounded to an integer k = t - u, which is
    # accepted with a probability proportional to `exp((t^2 - k^2) / (2 stddev^2)) = exp(u (2 k + u)
    # / (2 stddev^2))`.
    #
    # From there on, k is `floor(t)` plus a uniform integer of `stddev / 16` to `stddev / 8` values,
    # because the 24 random bits behind t leave gaps. Its variance and the rounding variance are
    # left out of t. The total variation distance from the discrete Gaussian distribution is below
    # 4e-6.
    sharding = known_sharding(like)
    if stddev >= DITHERED_STDDEV:
        first, second, third = jax.random.bits(key, (3,), jnp.uint32)
        hashed = hashed_indices(first, like.shape, sharding)
        bits = dither_bits(stddev)
        t = normal_from_words(rehash(hashed, second), math.sqrt(stddev**2 - 4**bits / 12))
        dither = rehash(hashed, third) >> (32 - bits)
        return jnp.floor(t).astype(jnp.int32) + (dither.astype(jnp.int32) - (2 ** (bits - 1) - 1))
    bound = (MOST_DEVIATIONS * stddev + 0.25) / (2 * stddev**2)

    def draw(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        key, accepted, drawn = carry
        key, normal_key, uniform_key = jax.random.split(key, 3)
        t = random_normal(normal_key, like.shape, stddev=stddev, sharding=sharding)
        uniform = jax.random.uniform(uniform_key, like.shape, out_sharding=sharding)
        k = jnp.round(t)
        u = t - k
        accept = jnp.log(uniform) < u * (2 * k + u) / (2 * stddev**2) - bound
        return key, accepted | accept, jnp.where(accepted, drawn, k.astype(jnp.int32))

    nothing = jnp.zeros_like(like, bool), jnp.zeros_like(like, jnp.int32)
    _, _, drawn = jax.lax.while_loop(lambda carry: ~jnp.all(carry[1]), draw, (key, *nothing))
    return drawn


def dither_bits(stddev: float) -> int:
    """Return the random bits of the uniform integers that fill the gaps of normal numbers."""
    return int(math.log2(stddev / 8))
