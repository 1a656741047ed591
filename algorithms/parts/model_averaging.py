"""A population of models without a server's model: means, soups, and exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Num

from fedpax.errors import ArgumentError


def population_mean(models: chex.ArrayTree) -> chex.ArrayTree:
    """Average models that are stacked along the first axis. Outside a round too."""

    def average(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        return leaf.mean(0)

    return jax.tree.map(average, models)


def merge(
    models: chex.ArrayTree, weights: Num[Array, " models"] | Sequence[float] | None = None
) -> chex.ArrayTree:
    """Merge models into one: `theta = sum_j w_j theta_j / sum_j w_j`.

    With equal weights this is the uniform soup.

    Args:
        models: a pytree of float arrays `[n, ...]`, such as `state.expert_params`.
        weights: `[n]`, not negative, with a positive sum. Default None: equal weights.

    Returns:
        The same pytree with leaves `[...]`, averaged in float32, in their own dtype.

    Raises:
        ValueError: `weights` does not have one entry for each model; one is negative, infinite or
            NaN, or all are 0. Traced weights are not checked.

    Example:
        >>> merge(jnp.array([[1.0, 2.0], [3.0, 6.0]]), [1, 3]).tolist()
        [2.5, 5.0]

    Reference:
        Wortsman et al., Model soups, arXiv:2203.05482, section 2 (uniform soup).
        Li et al., Branch-Train-Merge, arXiv:2208.03306, section 3.
    """
    count = jax.tree.leaves(models)[0].shape[0]
    shares = jnp.ones(count) if weights is None else jnp.asarray(weights, jnp.float32)
    if shares.shape != (count,):
        raise ArgumentError(
            f"weights has shape {list(shares.shape)}, expected [{count}], one entry for each model "
            "along the first axis. Leave weights=None for equal weights."
        )
    if not isinstance(shares, jax.core.Tracer):
        _check_shares(shares)
    shares = shares / jnp.sum(shares)
    return jax.tree.map(
        lambda leaf: jnp.tensordot(shares, leaf.astype(jnp.float32), axes=1).astype(leaf.dtype),
        models,
    )


def greedy_soup(
    models: chex.ArrayTree, score: Callable[[chex.ArrayTree], float]
) -> tuple[chex.ArrayTree, list[int]]:
    """Average the models that improve the average, added from the best to the worst.

    On the host. A model joins if the soup's score does not become worse.

    Args:
        models: a pytree of float arrays `[n, ...]`.
        score: a held-out score of one model; larger is better, such as an accuracy or minus a loss.

    Returns:
        The soup, and the indices of its models in the order in which they joined.

    Example:
        >>> score = lambda w: -abs(float(w) - 2.0)
        >>> soup, used = greedy_soup(jnp.array([9.0, 1.5, 2.75]), score)
        >>> float(soup), used
        (2.125, [1, 2])

    Reference:
        Wortsman et al., Model soups, arXiv:2203.05482, recipe 1.
    """
    count = jax.tree.leaves(models)[0].shape[0]
    alone = [score(jax.tree.map(lambda leaf, i=i: leaf[i], models)) for i in range(count)]
    first, *rest = sorted(range(count), key=lambda i: -alone[i])
    used, best = [first], alone[first]
    for index in rest:
        with_it = score(merge(models, [i in (*used, index) for i in range(count)]))
        if with_it >= best:
            used, best = [*used, index], with_it
    return merge(models, [i in used for i in range(count)]), used


def _check_shares(weights: Num[Array, " models"]) -> None:
    if not jnp.all((weights >= 0) & jnp.isfinite(weights)) or not jnp.any(weights > 0):
        raise ArgumentError(
            f"weights is {weights.tolist()}, expected nonnegative numbers, not all 0. Leave "
            "weights=None for equal weights."
        )


def permute_islands(
    values: chex.ArrayTree,
    choices: Sequence[Sequence[int]],
    choice: Int[Array, ""],
) -> chex.ArrayTree:
    """Give each island the value of another one: `out[i] = x[choices[choice][i]]`."""
    # With one participant per device group, this is one `collective-permute` per leaf.
    branches = [lambda x, sources=sources: _permute(x, sources) for sources in choices]
    if len(branches) == 1:
        return branches[0](values)
    return jax.lax.switch(choice, branches, values)


def perfect_matchings(n: int) -> list[tuple[int, ...]]:
    """Divide n participants into pairs, in all ways of a round-robin tournament."""
    # Returns for each matching the partner of each participant: itself for one of them if n is odd.
    # Every two participants are partners exactly once.
    players = n + n % 2  # with n odd, one participant is paired with itself
    last = players - 1
    matchings = []
    for c in range(max(last, 1)):
        partner = [(c - i) % max(last, 1) for i in range(players)]
        if players > 1:
            alone = next(i for i in range(last) if (2 * i - c) % last == 0)
            partner[alone], partner[last] = last, alone
        matchings.append(tuple(p if p < n else i for i, p in enumerate(partner[:n])))
    return matchings


def _permute(values: chex.ArrayTree, sources: Sequence[int]) -> chex.ArrayTree:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get("islands") == len(sources) > 1:
        pairs = [(source, target) for target, source in enumerate(sources)]
        return jax.shard_map(
            lambda x: jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, "islands", pairs), x),
            axis_names={"islands"},
            in_specs=P("islands"),
            out_specs=P("islands"),
        )(values)
    index = jnp.array(sources)

    def take(leaf: jax.Array) -> jax.Array:
        spec = jax.typeof(leaf).sharding.spec
        if all(axis is None for axis in spec):
            return leaf[index]
        return leaf.at[index].get(out_sharding=spec)

    return jax.tree.map(take, values)
