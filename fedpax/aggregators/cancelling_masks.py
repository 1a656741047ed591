"""Masks of secure aggregation, which cancel in an integer sum modulo 2^32."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, UInt32

from fedpax.aggregators.gaussian_noise import known_sharding
from fedpax.aggregators.random_words import hashed_indices, rehash

Leaves = Sequence[UInt32[Array, "..."]]


class MaskGraph(NamedTuple):
    """The pairs of participants that share a mask in a round: a ring with chords."""

    key: jax.Array  # PRNG key of the round
    order: Int[Array, " n"]  # int `[n]`, the participants in their order on the ring
    # int `[n]`, each participant's place on the ring; inverse of `order`.
    position: Int[Array, " n"]
    num_neighbors: int  # number of neighbours of each participant


def make_graph(key: jax.Array, participants: int, num_neighbors: int | None) -> MaskGraph:
    """Draw the graph of a round."""
    if num_neighbors is None:
        order = jnp.arange(participants)
        return MaskGraph(key, order, order, participants - 1)
    ring_key, key = jax.random.split(key)
    order = jax.random.permutation(ring_key, participants)
    return MaskGraph(key, order, jnp.argsort(order), num_neighbors)


def mask(codes: Leaves, index: Int[Array, ""], graph: MaskGraph) -> Leaves:
    """Mask the codes of one participant. Inside a mapped function."""
    # With neighbours A(i), a pseudo-random vector p_ij that i and j share, and a vector p_ii of its
    # own, participant i sends modulo 2^32
    #
    #     y_i = k_i + p_ii + sum_{j in A(i), j > i} p_ij - sum_{j in A(i), j < i} p_ij.
    #
    # In a sum over present participants, the vectors of two present neighbours cancel.
    draw = _vectors(index, graph, [(code.shape, known_sharding(code)) for code in codes])

    def add_neighbor(t: Int[Array, ""], masked: list[jax.Array]) -> list[jax.Array]:
        return _add(masked, draw(_neighbor(index, t, graph)))

    masked = _add(codes, draw(index))
    return jax.lax.fori_loop(0, graph.num_neighbors, add_neighbor, masked, unroll=4)


def left_over(
    shapes: Sequence[tuple[tuple[int, ...], P | None]],
    index: Int[Array, ""],
    graph: MaskGraph,
    here: Bool[Array, " n"],
) -> Leaves:
    """Recompute the part of a present participant's masks that does not cancel."""
    # The server does this after it knows which participants are present, from the seeds that the
    # participants have shared secretly: p_ii, and the p_ij of absent neighbours.
    draw = _vectors(index, graph, shapes)
    if not graph.num_neighbors:  # a single participant
        return draw(index)
    neighbors = jax.vmap(lambda t: _neighbor(index, t, graph))(jnp.arange(graph.num_neighbors))
    absent_first = neighbors[jnp.argsort(here[neighbors])]

    def add_absent(t: Int[Array, ""], left: list[jax.Array]) -> list[jax.Array]:
        return _add(left, draw(absent_first[t]))

    # A loop over absent neighbours alone: most are present, and their vectors cost as much.
    return jax.lax.fori_loop(0, jnp.sum(~here[neighbors]), add_absent, draw(index))


def _neighbor(index: Int[Array, ""], t: Int[Array, ""], graph: MaskGraph) -> Int[Array, ""]:
    """Return neighbour t: 1, -1, 2, -2, ... steps along the ring."""
    n = graph.order.shape[0]
    step = jnp.where(t % 2 == 0, t // 2 + 1, n - t // 2 - 1)
    return graph.order[(graph.position[index] + step) % n]


def _vectors(
    index: Int[Array, ""],
    graph: MaskGraph,
    shapes: Sequence[tuple[tuple[int, ...], P | None]],
) -> Callable[[Int[Array, ""]], list[jax.Array]]:
    """Return the function j -> p_ij for j >= i, and -p_ij for j < i."""
    # All pairs share the hash of the indices, which takes as long as the rest of a vector. Its key
    # belongs to no pair: pairs have numbers below n.
    shared = jax.random.fold_in(graph.key, graph.order.shape[0])
    first = jax.random.bits(shared, (len(shapes),), jnp.uint32)
    hashed = [hashed_indices(seed, *shape) for seed, shape in zip(first, shapes, strict=True)]

    def draw(neighbour: Int[Array, ""]) -> list[jax.Array]:
        pair = jax.random.fold_in(graph.key, jnp.minimum(index, neighbour))
        pair = jax.random.fold_in(pair, jnp.maximum(index, neighbour))
        seeds = jax.random.bits(pair, (len(shapes),), jnp.uint32)
        vectors = map(rehash, hashed, seeds)
        return [jnp.where(neighbour >= index, p, -p) for p in vectors]

    return draw


def _add(x: Leaves, y: Leaves) -> list[jax.Array]:
    return [a + b for a, b in zip(x, y, strict=True)]
