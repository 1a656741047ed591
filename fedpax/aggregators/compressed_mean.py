"""A mean of updates that are sent in few bits."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int

from fedpax.aggregators.aggregator import Aggregator, Weights, check_floats, normalized_weights
from fedpax.aggregators.codecs.codec import Codec
from fedpax.aggregators.codecs.device_exchange import choose_exchange
from fedpax.aggregators.codecs.rotated import check_codec
from fedpax.aggregators.codecs.update_coder import UpdateCoder
from fedpax.aggregators.random_numbers import in_stream
from fedpax.aggregators.sent_values import mark_sent, work_under_transfer
from fedpax.checks import PROBABILITY, check_argument, check_seed
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_broadcast, federated_map, federated_mean, federated_sum
from fedpax.primitives.layout import mesh_axis, unplaced_aval
from fedpax.primitives.placement import Placement, active_placements, resolve_placement


class CompressedMeanState(NamedTuple):
    """The state of `compressed_mean`."""

    round: Int[Array, ""]  # the random keys differ by round
    # float32 `[participants, ...]`, placed, of the structure of the parameters: the part of its
    # updates that each participant has not sent yet. None without error feedback.
    residual: chex.ArrayTree | None


def compressed_mean(
    codec: Codec,
    *,
    error_feedback: bool = False,
    decay: float = 1.0,
    mean_codec: Codec | None = None,
    seed: int = 0,
) -> Aggregator:
    """Average updates that are sent in few bits, by a codec of `fedpax.aggregators.codecs`.

    With n participants of weights w_i and updates x_i:

        c_i = n w_i / sum_j w_j x_i + decay e_i;   q_i = decode(encode(c_i));
        e_i <- c_i - q_i;   mean = sum_i q_i / n.

    Without error feedback, the e_i are 0 and the mean is as unbiased as the codec. With it and
    decay 1, the error telescopes: summed over rounds, the means differ from the exact ones by the
    current mean residual alone. A participant of weight 0 is absent, and keeps its residual.

    The exchange in which a device receives the fewest bits is compiled: see
    `codecs.choose_exchange`. All exchanges give the same mean, up to rounding in its last bits. The
    derivative is zero.

    With `mean_codec`, mean = decode(encode(sum_i q_i / n)): the rounding of the mean is lost, with
    error feedback too.

    A parameter of more than 65,536 entries is encoded with its minor axis sharded over the mesh
    axes within a participant, such as `fsdp`. Smaller parameters are gathered first.

    Use error feedback with a fixed set of participants: with sampled clients, the residual of one
    is added to the update of another.

    Args:
        codec: how an update is sent, such as `codecs.e3m0()`.
        error_feedback: whether participants add the unsent part to their next update. Biased
            codecs, such as `top_k` and `sign`, need it to converge.
        decay: factor of the residual each round, above 0 and at most 1.
        mean_codec: codec of the mean, with the blocks of `codec`. Default None: float32. A codec
            that draws random numbers by entry, such as `uniform`, rounds differently on different
            meshes.
        seed: seed of the random keys, which differ by round, participant and parameter.

    Returns:
        An aggregator with state `CompressedMeanState` and no metrics. The mean is computed in
        float32 and has the dtype of the updates. Updates that are not floats raise a `TypeError`.

    Raises:
        TypeError: `codec` or `mean_codec` is not a codec, `decay` is not a number, or `seed` is not
            an int.
        ValueError: `decay` is out of range, or is not 1 without error feedback; error feedback with
            a codec that is not contractive; `mean_codec` with smaller blocks than `codec`.

    Example:
        >>> import fedpax
        >>> from fedpax.aggregators import codecs
        >>> aggregator = compressed_mean(codecs.top_k(0.25), error_feedback=True)
        >>> @fedpax.program(islands=2)
        ... def average(updates):
        ...     state = aggregator.init(jnp.zeros(4))
        ...     mean, state, metrics = aggregator.aggregate(state, updates, None)
        ...     return mean, state.residual
        >>> mean, residual = average(jnp.array([[3.0, -1.0, 2.0, 0.5], [1.0, -2.0, -4.0, 0.0]]))
        >>> mean.tolist()  # each island sends one of its four entries
        [1.5, 0.0, -2.0, 0.0]
        >>> residual.tolist()
        [[0.0, -1.0, 2.0, 0.5], [1.0, -2.0, 0.0, 0.0]]

    Reference:
        Suresh et al., arXiv:1611.00429. Karimireddy et al., arXiv:1901.09847, algorithm 2. Sarfi et
        al., SparseLoCo, arXiv:2508.15706, algorithm 1 (decay). Douillard et al., Streaming DiLoCo,
        arXiv:2501.18512, section 2.4.
    """
    _check_arguments(codec, error_feedback, decay, mean_codec)
    decay, seed = float(decay), check_seed("compressed_mean", seed)

    def init(params: chex.ArrayTree) -> CompressedMeanState:
        zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros_like(x, jnp.float32))
        residual = federated_map(zeros, federated_broadcast(params)) if error_feedback else None
        return CompressedMeanState(jnp.int32(0), residual)

    def aggregate(
        state: CompressedMeanState, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, CompressedMeanState, dict[str, jax.Array]]:
        check_floats("compressed_mean", updates)
        leaves, tree = jax.tree.flatten(updates)
        if not leaves:
            return updates, state, {}
        placement = resolve_placement("compressed_mean", None).placement
        types = [unplaced_aval(jax.typeof(leaf)) for leaf in leaves]
        round_key = jax.random.fold_in(in_stream(jax.random.key(seed)), state.round)
        coder = UpdateCoder(codec, round_key, types, _model_axes(), mean_codec)
        parts = choose_exchange(
            codec, types, placement.size, _num_devices(placement), mean_codec=mean_codec
        ).parts

        def send(
            index: Int[Array, ""],
            update: list[jax.Array],
            residual: list[jax.Array] | None,
            share: Float[Array, ""] | None,
        ) -> tuple[chex.ArrayTree, list[jax.Array] | None]:
            unsent = [x.astype(jnp.float32) * (1.0 if share is None else share) for x in update]
            if residual is not None:
                unsent = [x + decay * e for x, e in zip(unsent, residual, strict=True)]
            if share is not None:  # an absent participant's update may be NaN
                unsent = [jnp.where(share == 0, 0.0, x) for x in unsent]
            unsent = jax.lax.stop_gradient(unsent)
            # Else a CPU encodes a word again for each value that it decodes.
            words = jax.lax.optimization_barrier(coder.encode(index, unsent))
            words = mark_sent(words, instead_of=unsent)
            decoded = coder.decode(index, words)
            if residual is not None:
                left = [x - q for x, q in zip(unsent, decoded, strict=True)]
                if share is not None:
                    left = [
                        jnp.where(share == 0, e, x) for x, e in zip(left, residual, strict=True)
                    ]
                residual = left
            return jax.tree.unflatten(tree, decoded if parts is None else words), residual

        residual = None if state.residual is None else jax.tree.leaves(state.residual)
        # Shares would need the sum of the weights first; weights after decoding let participants in
        # chunks train once, and not be stored.
        weigh_decoded = parts is None and residual is None
        shares = None if weights is None or weigh_decoded else normalized_weights(weights)
        sent, residual = federated_map(send, _indices(placement), leaves, residual, shares)
        if parts is None:
            if shares is None:
                average = federated_mean(sent, weights)
            else:  # shares are relative to all participants, also if some do not answer
                average = jax.tree.map(lambda x: x / placement.size, federated_sum(sent))
            means = coder.round_mean(placement.size, jax.tree.leaves(average))
        else:
            words = jax.tree.leaves(sent)
            means = _exchange(words, coder, placement, parts)
        residual = None if residual is None else jax.tree.unflatten(tree, residual)
        means = [m.astype(leaf.dtype) for m, leaf in zip(means, leaves, strict=True)]
        mean = jax.tree.unflatten(tree, means)
        return mean, CompressedMeanState(state.round + 1, residual), {}

    return Aggregator(init, aggregate)


def _indices(placement: Placement) -> Int[Array, " participants"]:
    return jnp.arange(placement.size, dtype=jnp.int32)


def _model_axes() -> tuple[str, ...]:
    """Return the mesh axes that bear no placement's name, without manual ones."""
    mesh = jax.sharding.get_abstract_mesh()
    placements = {active.placement.name for active in active_placements()}
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(n for n, type_ in kinds if n not in placements and type_ != AxisType.Manual)


def _exchange(
    words: list[jax.Array], coder: UpdateCoder, placement: Placement, parts: tuple[int, ...]
) -> list[Float[Array, "..."]]:
    """Average words by one transfer, or by two, each with half of a method's work under it."""
    axis, two = placement.name, max(parts) > 1
    tiles = coder.send_words(words, axis, parts)
    if two:
        tiles = work_under_transfer(tiles, fraction=0.5)
    means = coder.average_words(_indices(placement), tiles, axis, parts)
    if two:
        means = work_under_transfer(means, fraction=1.0)
    return coder.join_means(placement.size, means, axis, parts)


def _num_devices(placement: Placement) -> int:
    """Return the number of devices along the placement's mesh axis, 1 without one."""
    axis = mesh_axis(placement)
    return 1 if axis is None else jax.sharding.get_abstract_mesh().shape[axis]


def _check_arguments(
    codec: Codec, error_feedback: bool, decay: float, mean_codec: Codec | None
) -> None:
    check_codec("compressed_mean", "codec", codec)
    remedy = "Use 1.0 to forget nothing."
    check_argument("compressed_mean", "decay", decay, PROBABILITY, remedy=remedy)
    if decay != 1 and not error_feedback:
        raise ArgumentError(
            f"compressed_mean(): decay is {decay!r}, but there is no residual without error "
            "feedback. Set error_feedback=True, or leave decay out."
        )
    if error_feedback and not codec.contractive:
        raise ArgumentError(
            "compressed_mean(): error_feedback with a codec that is not contractive, whose "
            "residual could grow without bound. Use its biased form (drive(unbiased=False), "
            "random_k(..., unbiased=False)), more bits or smaller blocks, or "
            "error_feedback=False."
        )
    if mean_codec is None:
        return
    check_codec("compressed_mean", "mean_codec", mean_codec)
    if mean_codec.block_size < codec.block_size:
        raise ArgumentError(
            f"compressed_mean(): mean_codec has blocks of {mean_codec.block_size:,} entries, but "
            f"the mean is encoded in the blocks of codec, of {codec.block_size:,}. Pass "
            f"block_size={codec.block_size} to its function."
        )
