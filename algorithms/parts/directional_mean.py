"""The radial-directional mean: directions and norms of updates, averaged separately."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpax.aggregators import Aggregator
from fedpax.aggregators.aggregator import EmptyState, Weights
from fedpax.primitives import federated_map, federated_mean


def is_embedding(path: str) -> bool:
    """Return whether a parameter's path names an embedding, by the letters "embed"."""
    return "embed" in path.lower()


def directional_mean(
    *, plain: Callable[[str], bool] = is_embedding, layers: str = "layers"
) -> Aggregator:
    """Average the directions of updates, and give the result the mean of their norms.

    For the updates u_i of a tensor, with weights w_i, W = sum_i w_i and phi(u) = u / |u|:

        (sum_i w_i |u_i| / W) * phi(sum_i w_i phi(u_i) / W).

    Updates of independent islands are nearly orthogonal. Their plain mean is then sqrt(M) times
    shorter than each update; this mean keeps their length, so that the outer learning rate does not
    depend on the number M of islands. One reduction, of the bytes of a plain mean and two norms per
    tensor.

    Args:
        plain: whether a parameter, by its path such as `"layers/attention/key"`, is plainly
            averaged. Default: those whose path contains "embed".
        layers: in a parameter with this key in its path, each row of the first axis is a tensor: a
            layer of a stack.

    Returns:
        An aggregator without state and metrics. Where all updates are 0, or their directions cancel
        exactly, the result is 0.

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
        Douillard et al., Decoupled DiLoCo for Resilient Distributed Pre-training, arXiv:2604.21428.
        The norms are averaged as scalars, each tensor by itself.
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
                direction = norm * _direction(direction, norm_of_mean)
            merged.append(direction.astype(leaf.dtype))
        return jax.tree.unflatten(structure, merged), state, {}

    return Aggregator(init, aggregate)


def _norm(x: Float[Array, "..."], is_stacked: bool) -> Float[Array, "..."]:
    """Return the norm of a tensor, or of each layer, with axes of size 1."""
    axes = tuple(range(1 if is_stacked and x.ndim else 0, x.ndim))
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))


def _direction(x: Float[Array, "..."], norm: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x / norm; 0 where the norm is 0."""
    return jnp.where(norm > 0, x / jnp.where(norm > 0, norm, 1.0), 0.0)
