"""The mean of DP-FedAvg."""

from __future__ import annotations

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedpax.aggregators.aggregator import Aggregator, Weights, mean_dtype, num_participants, present
from fedpax.aggregators.clipping import (
    adapt_norm,
    check_learning_rate,
    check_norm,
    check_quantile,
    clip_update,
)
from fedpax.aggregators.gaussian_noise import add_server_noise, quantile_noise
from fedpax.aggregators.privacy_accounting import accountant_of
from fedpax.aggregators.sent_values import releases_per_round
from fedpax.checks import NON_NEGATIVE, POSITIVE, check_argument, check_seed
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_map, federated_sum


class PrivateMeanState(NamedTuple):
    """The state of `private_mean`."""

    round: Int[Array, ""]  # with the seed it determines the noise
    max_norm: Float[Array, ""]  # C of the next round


def private_mean(
    *,
    max_norm: float,
    noise_multiplier: float,
    seed: int,
    delta: float = 1e-6,
    releases_before: int = 0,
    expected_participants: float | None = None,
    quantile: float | None = None,
    learning_rate: float = 0.2,
    count_stddev: float | None = None,
) -> Aggregator:
    """Average updates with central differential privacy for participants, as DP-FedAvg does.

    With clipping norm C, noise multiplier z and m expected participants:

        mean = (sum_i u_i min(1, C / ||u_i||) + N(0, (z C)^2 I)) / m.

    Adding or removing one participant changes the sum by at most C: every present participant has
    weight 1, and m is fixed. `privacy_spent` and `noise_multiplier_for` relate z to epsilon.

    With `quantile` gamma, C follows this quantile of the norms. A second noisy sum counts norms up
    to C:

        b = 1/2 + (sum_i ([||u_i|| <= C] - 1/2) + N(0, s^2)) / m;  C <- C exp(-eta (b - gamma)).

    Both sums together have the privacy of one with noise multiplier z: the noise of the updates is
    `z' C` with `z' = (z^-2 - (2 s)^-2)^(-1/2)`.

    The guarantee covers the model and the metrics of this aggregator, not the metrics of clients,
    such as `"loss"`. Methods that sum more without noise have no guarantee, and no metric
    `"epsilon"` (`FederatedAlgorithm.sent_exactly`).

    In one program, such as `jax.jit(round)`, this is a simulation: the seed tells the noise. In
    stages (`fedpax.stages`), the server draws the noise from the operating system.

    Args:
        max_norm: C, above 0; with `quantile`, its initial value.
        noise_multiplier: z, at least 0.
        seed: int, seed of the noise of a simulation. Use another one for any other noise.
        delta: of the metric `"epsilon"`, between 0 and 1. Well below 1 over the number of all
            clients.
        releases_before: number of means with this noise multiplier over the same clients before the
            first round, such as the statistics of a table.
        expected_participants: m. Default None: the placement's size, for cohorts of fixed size.
            With Poisson sampling from a population of N, pass `sampling_probability * N`.
        quantile: gamma, between 0 and 1. Default None: keep C.
        learning_rate: eta, at least 0.
        count_stddev: s, above `noise_multiplier / 2`. Default None: m / 20, as in the paper.

    Returns:
        An aggregator with state `PrivateMeanState`. Participants of a weight above 0 are present,
        with equal weights. The result has the dtype of the updates, float32 for integers. An update
        whose norm is infinite or NaN counts as 0. Parameters under `optax.set_to_zero` get no
        noise. If all participants are absent, the noise moves the model. Metrics: `"max_norm"`, C,
        `"noise_stddev"`, the standard deviation of each coordinate of the mean, and with noise
        `"epsilon"`, spent so far without amplification by sampling.

    Raises:
        TypeError: an argument is not a number, or `seed` is not an int.
        ValueError: an argument is out of range; `count_stddev` is given without `quantile`, or the
            noise of the count alone spends more privacy than `noise_multiplier` allows (the default
            is checked when the program is traced).

    Example:
        >>> import fedpax
        >>> aggregator = private_mean(max_norm=1.0, noise_multiplier=0.5, seed=0)
        >>> @fedpax.program(clients=10)
        ... def average(state, updates):
        ...     return aggregator.aggregate(state, updates, None)
        >>> updates = jax.random.normal(jax.random.key(1), (10, 1000))
        >>> mean, state, metrics = average(aggregator.init(None), updates)
        >>> f"{metrics['noise_stddev']:.3f}", f"{mean.std():.2f}"  # 0.5 / 10
        ('0.050', '0.05')

    Reference:
        McMahan et al., arXiv:1710.06963, algorithm 1, with all weights 1. Andrew et al.,
        arXiv:1905.03871, algorithm 1 and theorem 1.
    """
    name = "private_mean"
    max_norm = check_norm(name, "max_norm", max_norm)
    remedy = "Use 0.0 for no noise."
    noise_multiplier = check_argument(
        name, "noise_multiplier", noise_multiplier, NON_NEGATIVE, remedy=remedy
    )
    learning_rate = check_learning_rate(name, learning_rate)
    seed = check_seed(name, seed)
    if expected_participants is not None:
        remedy = "Use sampling_probability * num_clients, or None for the placement's size."
        expected_participants = check_argument(
            name, "expected_participants", expected_participants, POSITIVE, remedy=remedy
        )
    spent = accountant_of(name, noise_multiplier, delta, releases_before, discrete=False)
    if quantile is not None:
        quantile = check_quantile(name, quantile)
    if count_stddev is not None:
        remedy = "Use expected_participants / 20, as the paper."
        count_stddev = check_argument(
            name, "count_stddev", count_stddev, NON_NEGATIVE, remedy=remedy
        )
        if quantile is None:
            raise ArgumentError(
                f"{name}(): count_stddev is {count_stddev}, but quantile is None, so nothing is "
                "counted. Pass quantile=0.5, or leave count_stddev out."
            )
        split_noise(noise_multiplier, count_stddev)

    def init(params: chex.ArrayTree) -> PrivateMeanState:
        return PrivateMeanState(jnp.int32(0), jnp.float32(max_norm))

    def aggregate(
        state: PrivateMeanState, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, PrivateMeanState, dict[str, jax.Array]]:
        expected = expected_participants or num_participants()
        norm, multiplier = state.max_norm, noise_multiplier

        def bound(update: chex.ArrayTree, here: jax.Array) -> tuple[chex.ArrayTree, jax.Array]:
            clipped, own_norm = clip_update(update, norm)
            clipped = jax.tree.map(lambda c: jnp.where(here, c, 0.0), clipped)
            return clipped, jnp.where(here, jnp.where(own_norm <= norm, 0.5, -0.5), 0.0)

        total, count = federated_sum(federated_map(bound, updates, present(weights)))
        new_norm = norm
        if quantile is not None:
            stddev = expected / 20 if count_stddev is None else count_stddev
            multiplier = split_noise(noise_multiplier, stddev)
            drawn = quantile_noise(seed, state.round, count)
            fraction = 0.5 + (count + stddev * drawn) / expected
            new_norm = adapt_norm(norm, fraction, quantile, learning_rate)
        noisy = total
        if multiplier:
            noisy = add_server_noise(seed, name, state.round, total, multiplier * norm)
        mean = jax.tree.map(lambda t, u: (t / expected).astype(mean_dtype(u)), noisy, updates)
        metrics = {"max_norm": norm, "noise_stddev": multiplier * norm / expected}
        if spent is not None:
            metrics["epsilon"] = spent.epsilon((state.round + 1) * releases_per_round())
        return mean, PrivateMeanState(state.round + 1, new_norm), metrics

    return Aggregator(
        init,
        aggregate,
        tolerates_non_finite=True,
        acts_when_all_absent=True,
        accountant=spent,
        counts_alike=True,
    )


def split_noise(noise_multiplier: float, count_stddev: float) -> float:
    """Return the noise multiplier of the updates that leaves room for the noisy count."""
    # The count has sensitivity 1/2, so that `1 / z^2 = 1 / z'^2 + 1 / (2 s)^2` for the noise
    # multiplier z of both sums together. Andrew et al., theorem 1.
    if noise_multiplier == 0:
        return 0.0
    if 2 * count_stddev <= noise_multiplier:
        raise ArgumentError(
            f"private_mean(): count_stddev is {count_stddev}, expected more than noise_multiplier "
            f"/ 2 = {noise_multiplier / 2}: the count alone would spend the privacy budget. Pass a "
            "larger count_stddev."
        )
    return 1 / math.sqrt(noise_multiplier**-2 - (2 * count_stddev) ** -2)
