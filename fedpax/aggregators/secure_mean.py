"""A mean of integers under masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Num, UInt32

from fedpax.aggregators.aggregator import (
    Aggregator,
    Weights,
    mean_dtype,
    num_participants,
    present,
    select,
)
from fedpax.aggregators.all_updates import known_to_all
from fedpax.aggregators.gaussian_noise import known_sharding
from fedpax.aggregators.random_numbers import hashed_indices, rehash, round_key
from fedpax.aggregators.sent_values import mark_sent, mark_server
from fedpax.checks import EVEN, POSITIVE, IntRange, check_argument, check_seed
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_broadcast, federated_map, federated_mean, federated_sum
from fedpax.primitives.layout import unplaced_aval
from fedpax.primitives.placement import is_for_stages
from fedpax.transforms.marks import MASKED


class SecureMeanState(NamedTuple):
    """The state of `secure_mean`."""

    round: Int[Array, ""]  # with the seed it determines the masks


def secure_mean(
    *, max_value: float, bits: int = 16, num_neighbors: int | None = None, seed: int = 0
) -> Aggregator:
    """Average updates as secure aggregation does: as integers under masks that cancel in the sum.

    Each participant quantizes its update to multiples of `s = r / (2^(bits - 1) - 1)`, with
    `r = max_value`, adds masks modulo 2^32, and sends y_i, which alone looks uniformly random:

        k_i = round(clip(u_i, -r, r) / s);   y_i = k_i + masks_i mod 2^32;   mean = s sum_i k_i / m.

    Pairs of participants share masks of opposite signs. A participant of weight 0 drops out after
    the masks are agreed on: the server then recomputes its neighbours' masks, and the self masks of
    the m present participants.

    In one program, such as `jax.jit(round)`, this simulates cost, quantization and dropouts: masks
    from a known seed give no security. A participant generates one pseudo-random vector per
    neighbour, and the server as many. With a `chunk_size`, memory is flat in n.

    In stages (`fedpax.stages`), participants send the integers k_i, which the engine masks: Flower
    with `secure=true`, and sites with `--secure_sums`. Other engines reject the program.

    Args:
        max_value: r, above 0. Entries are clipped to [-r, r].
        bits: bits per entry before masking, 2 to 24. The sum of n participants needs
            `n (2^(bits - 1) - 1) < 2^31`.
        num_neighbors: number of participants that each one shares masks with, an even number, on a
            random ring. Default None: all others.
        seed: int, seed of the masks.

    Returns:
        An aggregator with state `SecureMeanState`. All participants of a weight above 0 are
        present, with equal weights. A NaN entry is sent as 0. The result has the dtype of the
        updates, float32 for integers; 0 if no participant is present. Metrics: `"num_present"`,
        their number, and `"clipped_entry_fraction"`, the fraction of their entries outside [-r, r].

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; when the program is traced: the sum could
            overflow, or there are not more than `num_neighbors` participants.

    Example:
        >>> import fedpax
        >>> aggregator = secure_mean(max_value=1.0)
        >>> @fedpax.program(clients=3)
        ... def average(updates, weights):
        ...     return aggregator.aggregate(aggregator.init(None), updates, weights)
        >>> updates = jnp.array([[0.5, -0.25], [0.9, 0.9], [0.25, 0.75]])
        >>> mean, state, metrics = average(updates, jnp.array([1, 0, 1]))  # the second drops out
        >>> mean.round(4).tolist()
        [0.375, 0.25]

    Reference:
        Bonawitz et al., arXiv:1611.04482, section 3 (double masking). Bell et al., IACR ePrint
        2020/704, section 3 (a random Harary graph of neighbours).
    """
    name = "secure_mean"
    remedy = "Use the largest entry that an update may have, such as 1.0."
    max_value = check_argument(name, "max_value", max_value, POSITIVE, remedy=remedy)
    remedy = "Use 16; updates are float32, with 24 bits."
    bits = check_argument(name, "bits", bits, IntRange(least=2, most=24), remedy=remedy)
    num_neighbors = check_neighbors(name, num_neighbors)
    seed = check_seed(name, seed)
    code = FixedPoint(max_value, bits)

    def init(params: chex.ArrayTree) -> SecureMeanState:
        return SecureMeanState(jnp.int32(0))

    def encode(update: chex.ArrayTree, index: Int[Array, ""]) -> chex.ArrayTree:
        return jax.tree.map(code.encode, update)

    def clipped_entries(update: chex.ArrayTree, here: Bool[Array, ""]) -> Float[Array, ""]:
        leaves = jax.tree.leaves(update)
        outside = [jnp.sum(code.clipped(u)).astype(jnp.float32) for u in leaves]
        size = sum(u.size for u in leaves)
        return jnp.where(here, sum(outside) / max(size, 1), 0.0)

    def aggregate(
        state: SecureMeanState, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, SecureMeanState, dict[str, jax.Array]]:
        here = present(weights)
        check_sum(name, num_participants(), code.largest)
        key = round_key(seed, "masks", state.round)
        total = secure_sum(name, encode, updates, here, key, num_neighbors)
        count = federated_sum(here)

        clipped = federated_mean(federated_map(clipped_entries, updates, here), here)
        metrics = {"clipped_entry_fraction": clipped, "num_present": count}
        mean = jax.tree.map(lambda k, u: code.decode(k, count, u), total, updates)
        return mean, SecureMeanState(state.round + 1), metrics

    def limits(n: int) -> dict[str, int]:
        return {"bits": _most_bits(n), "num_neighbors": most_neighbors(n)}

    return Aggregator(
        init,
        aggregate,
        needs_all=True,
        tolerates_non_finite=True,
        counts_alike=True,
        limits=limits,
    )


def secure_sum(
    function: str,
    encode: Callable[[chex.ArrayTree, Int[Array, ""]], chex.ArrayTree],
    updates: chex.ArrayTree,
    here: Bool[Array, " participants"],
    key: jax.Array,
    num_neighbors: int | None,
) -> chex.ArrayTree:
    """Sum integers exactly, modulo 2^32, under masks, which in stages the engine adds."""
    n = num_participants()
    if num_neighbors is not None and num_neighbors >= n:
        raise ArgumentError(
            f"{function}(): num_neighbors is {num_neighbors}, expected fewer than the {n} "
            "participants. Leave it None for all of them."
        )
    if is_for_stages():
        return engine_sum(lambda update: encode(update, jnp.int32(0)), updates, here)
    graph = make_graph(key, n, num_neighbors)

    def send(
        update: chex.ArrayTree, index: Int[Array, ""], present: Bool[Array, ""]
    ) -> chex.ArrayTree:
        codes, tree = jax.tree.flatten(encode(update, index))
        masked = mask([code.astype(jnp.uint32) for code in codes], index, graph)
        return select(present, mark_sent(jax.tree.unflatten(tree, masked), instead_of=update))

    masked = federated_sum(federated_map(send, updates, jnp.arange(n), here))

    # The server's part, in parallel over the participants' devices.
    slices = [unplaced_aval(jax.typeof(leaf)) for leaf in jax.tree.leaves(updates)]
    shapes = [(aval.shape, _spec(aval)) for aval in slices]
    everyone = federated_broadcast(known_to_all(here))

    def recompute(
        index: Int[Array, ""], present: Bool[Array, ""], everyone: Bool[Array, " participants"]
    ) -> Leaves:
        return mark_server(select(present, left_over(shapes, index, graph, everyone)))

    left = federated_sum(federated_map(recompute, jnp.arange(n), here, everyone))
    left = jax.tree.unflatten(jax.tree.structure(updates), left)
    return jax.tree.map(
        lambda m, u: jax.lax.bitcast_convert_type((m - u).astype(jnp.uint32), jnp.int32),
        masked,
        left,
    )


def engine_sum(
    encode: Callable[[chex.ArrayTree], chex.ArrayTree],
    updates: chex.ArrayTree,
    here: Bool[Array, " participants"],
    *,
    noise: chex.ArrayTree = None,
    least: int = 1,
) -> chex.ArrayTree:
    """Sum the integers `encode(update)` of participants, in stages whose engine masks the sums."""
    # Participants that answer and are not `here` add their `noise` alone. The engine sums over
    # `least` participants or more.

    def send(
        update: chex.ArrayTree, here: Bool[Array, ""], noise: chex.ArrayTree
    ) -> chex.ArrayTree:
        codes = select(here, encode(update))
        if noise is not None:
            codes = jax.tree.map(jnp.add, codes, noise)
        return jax.tree.map(lambda k: checkpoint_name(k, f"{MASKED} {least}"), codes)

    return federated_sum(federated_map(send, updates, here, noise))


def _spec(aval: Any) -> P | None:
    spec = aval.sharding.spec
    return spec if any(entry is not None for entry in spec) else None


def check_neighbors(function: str, num_neighbors: int | None) -> int | None:
    """Return a number of neighbours, an even int; None for all other participants."""
    if num_neighbors is None:
        return None
    remedy = "Use None for all other participants."
    if isinstance(num_neighbors, int) and num_neighbors % 2:  # half of them on either side
        remedy = f"Use {num_neighbors + 1}, half of them on either side of a ring."
    return check_argument(function, "num_neighbors", num_neighbors, EVEN, remedy=remedy)


def most_neighbors(participants: int) -> int:
    """Return the largest number of neighbours, which is even."""
    return (participants - 1) // 2 * 2


def _most_bits(participants: int) -> int:
    """Return the bits of the largest codes whose sum fits an int32."""
    return ((2**31 - 1) // participants + 1).bit_length()


def check_sum(function: str, participants: int, largest: int) -> None:
    """Check that sums of codes of at most `largest` in absolute value fit an int32."""
    if participants * largest >= 2**31:
        raise ArgumentError(
            f"{function}(): the sum of {participants:,} participants' integers of up to "
            f"{largest:,} does not fit 32 bits. Use at most bits={_most_bits(participants)}."
        )


# ---- masks of secure aggregation, which cancel in an integer sum modulo 2^32

Leaves = Sequence[UInt32[Array, "..."]]


class MaskGraph(NamedTuple):
    """The pairs of participants that share a mask in a round: a ring with chords."""

    key: jax.Array
    order: Int[Array, " n"]  # the participants in their order on the ring
    # each participant's place; inverse of `order`
    position: Int[Array, " n"]
    num_neighbors: int


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
    # The server does this from the seeds that participants have shared secretly: p_ii, and the p_ij
    # of absent neighbours.
    draw = _vectors(index, graph, shapes)
    if not graph.num_neighbors:  # a single participant
        return draw(index)
    neighbors = jax.vmap(lambda t: _neighbor(index, t, graph))(jnp.arange(graph.num_neighbors))
    absent_first = neighbors[jnp.argsort(here[neighbors])]

    def add_absent(t: Int[Array, ""], left: list[jax.Array]) -> list[jax.Array]:
        return _add(left, draw(absent_first[t]))

    # Most neighbours are present: their vectors would cost time.
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
    # All pairs share the hash of the indices, half of the work. The key of the hash is n, since
    # pairs have the numbers below n.
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


# ---- floats as integers whose sums are exact: the numbers of secure aggregation


class FixedPoint(NamedTuple):
    """Multiples of `step = max_value / largest`, with `largest = 2^(bits - 1) - 1`.

    `encode` and `decode` are the arithmetic of `secure_mean`, and of sums between sites.

    Attributes:
        max_value: entries are clipped to [-max_value, max_value].
        bits: bits per entry, 2 to 24.

    Example:
        >>> code = FixedPoint(max_value=1.0, bits=16)
        >>> total = code.encode(jnp.array([0.5, 2.0])) + code.encode(jnp.array([0.25, -0.5]))
        >>> code.decode(total, jnp.int32(2), like=jnp.zeros(2)).round(4).tolist()
        [0.375, 0.25]
    """

    max_value: float
    bits: int

    @property
    def largest(self) -> int:
        """The largest code."""
        return int(2 ** (self.bits - 1)) - 1

    @property
    def step(self) -> float:
        """The difference of values with successive codes."""
        return self.max_value / self.largest

    def encode(self, u: Num[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Return the int32 codes of an array; NaN has the code 0."""
        u = jnp.nan_to_num(u.astype(jnp.float32), nan=0.0)
        clipped = jnp.clip(u, -self.max_value, self.max_value)
        return jnp.round(clipped / self.step).astype(jnp.int32)

    def clipped(self, u: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
        """Return which entries are not encoded with an error of at most `step / 2`."""
        return ~(jnp.abs(u) <= self.max_value)

    def decode(
        self, total: Int[Array, "*shape"], count: Int[Array, ""], like: jax.Array
    ) -> Float[Array, "*shape"]:
        """Return the mean from a sum of `count` codes, in the dtype of a mean of `like`."""
        return (self.step * total / jnp.maximum(count, 1)).astype(mean_dtype(like))
