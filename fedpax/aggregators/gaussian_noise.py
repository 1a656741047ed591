"""Gaussian noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fedpax.aggregators.aggregator import (
    Aggregator,
    AggregatorTransformation,
    Weights,
    mean_dtype,
    num_participants,
)
from fedpax.aggregators.random_numbers import round_key
from fedpax.checks import NON_NEGATIVE, check_argument, check_seed
from fedpax.primitives import federated_map
from fedpax.primitives.placement import is_for_stages
from fedpax.transforms.marks import own_noise, server_noise

_STDDEV_REMEDY = "Use 0.0 for no noise."


class NoiseState(NamedTuple):
    """The state of `add_noise` and `add_local_noise`."""

    round: Int[Array, ""]  # with the seed it determines the noise
    aggregator_state: chex.ArrayTree


def add_noise(stddev: float, *, seed: int) -> AggregatorTransformation:
    """Add Gaussian noise to the aggregate, on the server: `aggregate + N(0, stddev^2 I)`.

    The noise is fresh in each round. In stages, the server draws it from the operating system
    instead. For differential privacy use `private_mean`.

    Args:
        stddev: standard deviation of the noise of each coordinate, in the units of the update.
        seed: int, seed of the noise. Choose another one for every other source of noise.

    Returns:
        A transformation with state `NoiseState`. Noise is added in float32, and the result has the
        dtype of the inner aggregate.

    Raises:
        TypeError: `stddev` is not a number, or `seed` is not an int.
        ValueError: `stddev` is negative or not finite.

    Example:
        >>> import fedpax
        >>> from fedpax.aggregators import chain, mean
        >>> aggregator = chain(add_noise(0.5, seed=0), mean())
        >>> @fedpax.program(clients=4)
        ... def average(updates):
        ...     return aggregator.aggregate(aggregator.init(None), updates, None)[0]
        >>> noise = average(jnp.zeros((4, 10_000)))
        >>> round(noise.std().item(), 1)
        0.5
    """
    stddev = check_argument("add_noise", "stddev", stddev, NON_NEGATIVE, remedy=_STDDEV_REMEDY)
    seed = check_seed("add_noise", seed)

    def transform(inner: Aggregator) -> Aggregator:
        def aggregate(
            state: NoiseState, updates: chex.ArrayTree, weights: Weights
        ) -> tuple[chex.ArrayTree, NoiseState, dict[str, jax.Array]]:
            aggregated, inner_state, metrics = inner.aggregate(
                state.aggregator_state, updates, weights
            )
            noisy = add_server_noise(seed, "add_noise", state.round, aggregated, stddev)
            return noisy, NoiseState(state.round + 1, inner_state), metrics

        return inner._replace(init=_init(inner), aggregate=aggregate, acts_when_all_absent=True)

    return transform


def add_local_noise(stddev: float, *, seed: int) -> AggregatorTransformation:
    """Add independent Gaussian noise to each participant's update: `u_i + N(0, stddev^2 I)`.

    After `clip_by_norm(C)` it is the Gaussian mechanism of local differential privacy, with
    sensitivity 2 C. The mean of n participants has noise of standard deviation `stddev / sqrt(n)`.

    Args:
        stddev: standard deviation of the noise of each coordinate, in the units of the update.
        seed: int, seed of the noise. Choose another one for every other source of noise.

    Returns:
        A transformation with state `NoiseState`. Noise is added in float32, and the result has the
        dtype of the update. In stages, each participant draws its noise from the operating system.

    Raises:
        TypeError: `stddev` is not a number, or `seed` is not an int.
        ValueError: `stddev` is negative or not finite.

    Example:
        >>> import fedpax
        >>> from fedpax.aggregators import chain, clip_by_norm, mean
        >>> aggregator = chain(clip_by_norm(1.0), add_local_noise(0.5, seed=0), mean())
        >>> @fedpax.program(clients=4)
        ... def average(updates):
        ...     return aggregator.aggregate(aggregator.init(None), updates, None)[0]
        >>> noise = average(jnp.zeros((4, 10_000)))
        >>> round(noise.std().item(), 2)  # 0.5 / sqrt(4)
        0.25
    """
    stddev = check_argument(
        "add_local_noise", "stddev", stddev, NON_NEGATIVE, remedy=_STDDEV_REMEDY
    )
    seed = check_seed("add_local_noise", seed)

    def transform(inner: Aggregator) -> Aggregator:
        def aggregate(
            state: NoiseState, updates: chex.ArrayTree, weights: Weights
        ) -> tuple[chex.ArrayTree, NoiseState, dict[str, jax.Array]]:
            if is_for_stages():
                drawn = own_noise(updates, 1.0, jnp.float32)
                updates = federated_map(lambda u, n: perturb(u, n, stddev), updates, drawn)
            else:
                key = round_key(seed, "add_local_noise", state.round)

                def perturb_own(update: chex.ArrayTree, index: Int[Array, ""]) -> chex.ArrayTree:
                    return perturb(update, _normal(jax.random.fold_in(key, index), update), stddev)

                updates = federated_map(perturb_own, updates, jnp.arange(num_participants()))
            aggregated, inner_state, metrics = inner.aggregate(
                state.aggregator_state, updates, weights
            )
            return aggregated, NoiseState(state.round + 1, inner_state), metrics

        return inner._replace(init=_init(inner), aggregate=aggregate)

    return transform


def _init(inner: Aggregator) -> Callable[[chex.ArrayTree], NoiseState]:
    return lambda params: NoiseState(jnp.int32(0), inner.init(params))


def add_server_noise(
    seed: int,
    purpose: str,
    round_number: Int[Array, ""],
    tree: chex.ArrayTree,
    stddev: float | jax.Array,
) -> chex.ArrayTree:
    """Add `N(0, stddev^2)` noise to each coordinate: the server's own in stages."""
    if is_for_stages():
        return perturb(tree, jax.tree.map(server_noise, tree), stddev)
    return perturb(tree, _normal(round_key(seed, purpose, round_number), tree), stddev)


def quantile_noise(
    seed: int, round_number: Int[Array, ""], like: Float[Array, ""]
) -> Float[Array, ""]:
    """Draw one standard normal number of the server for a quantile, its own in stages."""
    if is_for_stages():
        return server_noise(like)
    return jax.random.normal(round_key(seed, "quantile", round_number))


def perturb(
    tree: chex.ArrayTree, noise: chex.ArrayTree, stddev: float | jax.Array
) -> chex.ArrayTree:
    """Add standard normal numbers times a standard deviation to a pytree, in float32."""
    return jax.tree.map(
        lambda x, n: (x.astype(jnp.float32) + stddev * n).astype(mean_dtype(x)), tree, noise
    )


def _normal(key: jax.Array, tree: chex.ArrayTree) -> chex.ArrayTree:
    leaves, structure = jax.tree.flatten(tree)
    drawn = [
        jax.random.normal(
            jax.random.fold_in(key, i), leaf.shape, jnp.float32, out_sharding=known_sharding(leaf)
        )
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, drawn)


def known_sharding(leaf: jax.Array) -> P | None:
    """Return the partition spec in an array's type, which explicit mesh axes have; else None."""
    spec = jax.typeof(leaf).sharding.spec
    return spec if any(entry is not None for entry in spec) else None
