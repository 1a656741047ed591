"""Masks of secure aggregation, which cancel in an integer sum modulo 2^32."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from fedpax.aggregators.gaussian_noise import known_sharding

Leaves = Sequence[UInt32[Array, "..."]]


class MaskGraph(NamedTuple):
    """The pairs of participants that share a mask in a round: a ring with chords.

    Attributes:
        key: PRNG key of the round.
        order: int `[n]`, the participants in their order on the ring.
        position: int `[n]`, each participant's place on the ring; inverse of `order`.
        num_neighbors: number of neighbours of each participant.
    """

    key: jax.Array
    order: Int[Array, " n"]
    position: Int[Array, " n"]
    num_neighbors: int


def make_graph(key: jax.Array, participants: int, num_neighbors: int | None) -> MaskGraph:
    """Draw the graph of a round.

    Args:
        key: PRNG key of the round.
        participants: number of participants, n.
        num_neighbors: even number of neighbours on a random ring, half on either side. Default
            None: all others.

    Returns:
        The graph.
    """
    if num_neighbors is None:
        order = jnp.arange(participants)
        return MaskGraph(key, order, order, participants - 1)
    ring_key, key = jax.random.split(key)
    order = jax.random.permutation(ring_key, participants)
    return MaskGraph(key, order, jnp.argsort(order), num_neighbors)


def mask(
    codes: Leaves, index: Int[Array, ""], graph: MaskGraph, here: Bool[Array, " n"]
) -> tuple[Leaves, Leaves]:
    """Mask the codes of one participant. Inside a mapped function.

    With neighbours A(i), a pseudo-random vector p_ij that i and j share, and a vector p_ii of its
    own, participant i sends modulo 2^32

        y_i = k_i + p_ii + sum_{j in A(i), j > i} p_ij - sum_{j in A(i), j < i} p_ij.

    In the sum over present participants, the vectors of two present neighbours cancel. The server
    recomputes the rest, from the seeds that the participants have shared secretly: p_ii of present
    ones, and the p_ij between a present and an absent one.

    Args:
        codes: uint32 arrays, k_i.
        index: i.
        graph: the pairs.
        here: the participants that are present. Only the second result depends on it.

    Returns:
        The masked codes y_i, and the part of the mask that does not cancel.
    """
    n = graph.order.shape[0]

    def vector(other: Int[Array, ""]) -> list[jax.Array]:
        pair = jax.random.fold_in(graph.key, jnp.minimum(index, other))
        pair = jax.random.fold_in(pair, jnp.maximum(index, other))
        return [
            jax.random.bits(
                jax.random.fold_in(pair, leaf),
                code.shape,
                jnp.uint32,
                out_sharding=known_sharding(code),
            )
            for leaf, code in enumerate(codes)
        ]

    def add_neighbor(
        t: Int[Array, ""], carry: tuple[list[jax.Array], list[jax.Array]]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        masked, left = carry
        # Steps 1, -1, 2, -2, ... along the ring; for an odd number the last one is n / 2.
        step = jnp.where(t % 2 == 0, t // 2 + 1, n - t // 2 - 1)
        other = graph.order[(graph.position[index] + step) % n]
        shared = [jnp.where(other > index, p, -p) for p in vector(other)]
        masked = [m + p for m, p in zip(masked, shared, strict=True)]
        left = [jnp.where(here[other], u, u + p) for u, p in zip(left, shared, strict=True)]
        return masked, left

    own = vector(index)
    masked = [code + p for code, p in zip(codes, own, strict=True)]
    return jax.lax.fori_loop(0, graph.num_neighbors, add_neighbor, (masked, own))
