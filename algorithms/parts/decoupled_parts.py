"""Decoupled DiLoCo in parts, for islands with their own runtimes, and its mean."""

from __future__ import annotations

import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedpax.aggregators import Aggregator
from fedpax.aggregators.aggregator import EmptyState, Weights
from fedpax.aggregators.codecs import Codec
from fedpax.algorithm import AlgorithmParts, LossFn
from fedpax.algorithms.parts.fragments import FragmentFn, make_fragments
from fedpax.algorithms.parts.inner_steps import make_inner_steps
from fedpax.algorithms.parts.method_checks import check_optimizer, check_setting
from fedpax.algorithms.parts.server import given_aggregator, outer_sgd
from fedpax.checks import COUNT, NON_NEGATIVE_OR_INFINITE, Range, check_argument
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_map, federated_mean


def decoupled_diloco_parts(
    loss_fn: LossFn,
    *,
    islands: int,
    inner_optimizer: optax.GradientTransformation,
    steps_per_sync: int,
    outer_optimizer: optax.GradientTransformation | None = None,
    fragments: int | FragmentFn = 1,
    aggregator: Aggregator | None = None,
    codec: Codec | None = None,
    error_feedback: bool = False,
    quorum: int = 1,
    grace_seconds: float = 0.0,
    max_steps_ahead: int | None = None,
    max_staleness: int = 4,
    max_norm: float | None = None,
) -> AlgorithmParts:
    """Make the parts of Decoupled DiLoCo, for `fedpax syncer` and `fedpax join`.

    This is `decoupled_diloco` with real times of steps and failures in place of a schedule, but a
    late island loses no step within `max_staleness`:

    - Steps during the transfer of a fragment are added to the merged one, and are part of the next
      update.
    - A late update is part of the next merge of its fragment.
    - An update's weight is tokens^2 / steps since the former one of the fragment.

    With a quorum of all islands and `max_steps_ahead=steps_per_sync` this is `decoupled_diloco`
    with `delay=0`.

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars)`.
        islands: number of shards of the data, and the largest number of islands.
        inner_optimizer: any optax optimizer.
        steps_per_sync: S, inner steps between two updates of an island; with P fragments, H / P.
        outer_optimizer: any optax optimizer. Default None: as in `decoupled_diloco`.
        fragments: as in `decoupled_diloco`. Default 1: the whole model.
        aggregator: merges the outer gradients of a fragment. Default None: `directional_mean`.
        codec: the format of an update on the wire. Default None: float32.
        error_feedback: whether an island adds the codec's error to its next update of the fragment.
        quorum: K, number of islands that must send a fragment before it is merged; islands of one
            certificate count once. Default 1.
        grace_seconds: the most seconds that the syncer waits after the quorum. Default 0.0.
        max_steps_ahead: the most inner steps that an island takes after the last merge that it has
            received; then it waits. Default None: 32 S.
        max_staleness: an update is dropped if its fragment was merged more often than this since
            the island took the update's first step.
        max_norm: an update with a larger L2 norm is dropped. Default None: up to 1e18.

    Returns:
        The parts, for `FederatedAlgorithm.parts`.

    Raises:
        TypeError: a setting has another type.
        ValueError: a setting is out of range, or `error_feedback` is True and the codec is not
            contractive.

    Example:
        >>> import jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> parts = decoupled_diloco_parts(
        ...     loss_fn, islands=4, inner_optimizer=optax.sgd(0.5), steps_per_sync=2, quorum=3
        ... )
        >>> w, _, report = parts.inner_steps(
        ...     jnp.float32(0.0), parts.init_inner(jnp.float32(0.0)), jnp.ones((2, 1)), None)
        >>> w.item(), report.num_steps.item()
        (1.0, 2.0)

    Reference:
        Douillard et al., arXiv:2604.21428.
    """
    name = "decoupled_diloco_parts"
    check_optimizer(name, "inner_optimizer", inner_optimizer)
    check_argument(name, "islands", islands, COUNT, remedy="Pass the number of shards of the data.")
    remedy = "Pass the inner steps between two updates, such as 24."
    check_argument(name, "steps_per_sync", steps_per_sync, COUNT, remedy=remedy)
    remedy = "Pass 1 to merge as soon as one island has sent, or islands to wait for all."
    check_setting(name, "quorum", quorum, Range(least=1, most=islands), remedy=remedy)
    remedy = "Pass 0.0 to merge at the quorum."
    check_setting(name, "grace_seconds", grace_seconds, NON_NEGATIVE_OR_INFINITE, remedy=remedy)
    remedy = "Pass 4, the default."
    check_setting(name, "max_staleness", max_staleness, NON_NEGATIVE_OR_INFINITE, remedy=remedy)
    if max_norm is not None:
        remedy = "Pass None for the default, 1e18."
        check_setting(name, "max_norm", max_norm, NON_NEGATIVE_OR_INFINITE, remedy=remedy)
    if max_steps_ahead is not None:
        remedy = "Pass None for the default, 32 steps_per_sync."
        check_setting(
            name,
            "max_steps_ahead",
            max_steps_ahead,
            Range(least=steps_per_sync, most=math.inf),
            remedy=remedy,
        )
    if error_feedback and codec is not None and not codec.contractive:
        raise ArgumentError(
            f"{name}(): error_feedback with a codec that is not contractive, whose residual could "
            "grow without bound. Use its biased form, or error_feedback=False."
        )
    return AlgorithmParts(
        islands=islands,
        init_inner=inner_optimizer.init,
        inner_steps=make_inner_steps(loss_fn, inner_optimizer),
        make_fragments=lambda params: make_fragments(fragments, params, inner_optimizer),
        outer_optimizer=outer_sgd(name, outer_optimizer, 0.4),
        aggregator=given_aggregator(aggregator, directional_mean()),
        steps_per_sync=steps_per_sync,
        codec=codec,
        error_feedback=error_feedback and codec is not None,
        quorum=quorum,
        grace_seconds=grace_seconds,
        max_steps_ahead=max_steps_ahead,
        max_staleness=max_staleness,
        max_norm=max_norm,
    )


def is_embedding(path: str) -> bool:
    """Return whether a parameter's path names an embedding, by the letters "embed"."""
    return "embed" in path.lower()


# The norm that rounding errors can leave of directions that cancel.
_ROUNDING = 1e-6


def directional_mean(
    *, plain: Callable[[str], bool] = is_embedding, layers: str = "layers"
) -> Aggregator:
    """Average the directions of updates, and give the result the mean of their norms.

    For the updates u_i of a tensor, with weights w_i, W = sum_i w_i and phi(u) = u / |u|:

        (sum_i w_i |u_i| / W) * phi(sum_i w_i phi(u_i) / W).

    The plain mean of nearly orthogonal updates of M islands is sqrt(M) times shorter than each;
    this mean keeps their length.

    Args:
        plain: whether a parameter, by its path such as `"layers/attention/key"`, is plainly
            averaged. Default: those whose path contains "embed".
        layers: in a parameter with this key in its path, each row of the first axis is a tensor: a
            layer of a stack.

    Returns:
        An aggregator without state and metrics. The result is 0 where the directions cancel, up to
        rounding.

    Example:
        >>> import fedpax
        >>> aggregator = directional_mean()
        >>> @fedpax.program(islands=2)
        ... def merge(updates):
        ...     return aggregator.aggregate(aggregator.init(None), updates, None)[0]
        >>> merged = merge(jnp.array([[3.0, 0.0], [0.0, 1.0]]))
        >>> round(jnp.linalg.norm(merged).item(), 4)  # the mean of 3 and 1
        2.0

    Reference:
        Douillard et al., arXiv:2604.21428.
    """

    def init(params: chex.ArrayTree) -> EmptyState:
        return EmptyState()

    def aggregate(
        state: EmptyState, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, EmptyState, dict[str, jax.Array]]:
        entries, structure = jax.tree.flatten_with_path(updates)
        paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in entries]

        def split(leaves: list[jax.Array]) -> list[tuple[jax.Array, jax.Array | None]]:
            """Return each tensor's direction and norm; of a plain one the update and None."""
            parts: list[tuple[jax.Array, jax.Array | None]] = []
            for path, leaf in zip(paths, leaves, strict=True):
                if plain(path):
                    parts.append((leaf, None))
                    continue
                values = leaf.astype(jnp.float32)
                norm = _norm(values, layers in path.split("/"))
                parts.append((_direction(values, norm), norm))
            return parts

        averaged = federated_mean(federated_map(split, [leaf for _, leaf in entries]), weights)
        merged = []
        for path, (_, leaf), (direction, norm) in zip(paths, entries, averaged, strict=True):
            if norm is not None:
                norm_of_mean = _norm(direction, layers in path.split("/"))
                known = norm_of_mean > _ROUNDING
                direction = norm * _direction(direction, jnp.where(known, norm_of_mean, 0.0))
            merged.append(direction.astype(leaf.dtype))
        return jax.tree.unflatten(structure, merged), state, {}

    return Aggregator(init, aggregate)


def _norm(x: Float[Array, ...], is_stacked: bool) -> Float[Array, ...]:
    """Return the norm of a tensor, or of each layer, with axes of size 1."""
    axes = tuple(range(1 if is_stacked and x.ndim else 0, x.ndim))
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))


def _direction(x: Float[Array, ...], norm: Float[Array, ...]) -> Float[Array, ...]:
    """Return x / norm; 0 where the norm is 0."""
    return jnp.where(norm > 0, x / jnp.where(norm > 0, norm, 1.0), 0.0)
