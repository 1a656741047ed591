"""Exchange placed values between participants directly, without a reduction."""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int


def permute_islands(
    values: chex.ArrayTree,
    choices: Sequence[Sequence[int]],
    choice: Int[Array, ""],
) -> chex.ArrayTree:
    """Give each island the value of another one: `out[i] = x[choices[choice][i]]`."""
    # Inside a program. Where the placement's mesh axis holds one participant per device group, this
    # is one `collective-permute` per leaf, and each participant sends its value once. The choices
    # are known to the compiler, and one of them is taken at run time.
    branches = [lambda x, sources=sources: _permute(x, sources) for sources in choices]
    if len(branches) == 1:
        return branches[0](values)
    return jax.lax.switch(choice, branches, values)


def perfect_matchings(n: int) -> list[tuple[int, ...]]:
    """Divide n participants into pairs, in all ways of a round-robin tournament."""
    # In the result every two participants are partners exactly once. If n is odd, one participant
    # of each matching is its own partner.
    # Returns for each matching the partner of each participant; one matching of singles for n = 1.
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
