"""Arrivals: which islands of a round arrive at a server, and which of them send an update."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from fedpax.algorithms.local_steps import placed_valid_steps
from fedpax.clients.cohort import Cohort
from fedpax.primitives import federated_map, federated_mean, federated_sum
from fedpax.training.algorithm import Metrics, Params


def without_absent(cohort: Cohort, position: Int[Array, " islands"]) -> Cohort:
    """Give islands that do not arrive in this round no steps. Inside a program.

    Args:
        cohort: the cohort of the round.
        position: each island's position in the order of arrivals; -1 where it does not arrive.

    Returns:
        The cohort with `num_steps`, 0 for an absent island.

    Example:
        >>> import fedpax
        >>> cohort = Cohort(jnp.zeros((3, 4, 1)))  # three islands, four steps
        >>> fedpax.program(islands=3)(lambda p: without_absent(cohort, p).num_steps)(
        ...     jnp.array([1, -1, 0])).tolist()
        [4, 0, 4]
    """
    most = jax.tree.leaves(cohort.batches)[0].shape[1]

    def steps(position: Int[Array, ""], own: Int[Array, ""] | None) -> Int[Array, ""]:
        return jnp.where(position >= 0, most if own is None else own, 0)

    return cohort._replace(num_steps=federated_map(steps, position, cohort.num_steps))


def outer_gradients(
    outer_gradient: Callable[..., tuple[Params, optax.OptState, Metrics]],
    local_params: Params,
    inner_state: optax.OptState,
    cohort: Cohort,
    islands: int,
) -> tuple[Params, optax.OptState, Bool[Array, " islands"], Metrics]:
    """Train each island from its own model. Inside a program.

    Args:
        outer_gradient: the result of `make_outer_gradient`.
        local_params: the islands' models, placed.
        inner_state: the states of their inner optimizers, placed.
        cohort: the cohort of the round, in which absent islands have no steps.
        islands: number of islands.

    Returns:
        The outer gradients and the inner states, placed; which islands have a valid step, and so
        an update to send; the mean metrics of those islands, with a schedule also their number,
        `arrivals`.
    """
    gradients, inner_state, metrics = federated_map(
        outer_gradient, local_params, inner_state, cohort.batches, cohort.num_steps
    )
    sends = _sending(cohort, islands)
    weights = federated_map(lambda s: s.astype(jnp.float32), sends)
    metrics = federated_mean(metrics, weights)
    if cohort.schedule is not None:
        metrics |= {"arrivals": federated_sum(weights)}
    return gradients, inner_state, sends, metrics


def _sending(cohort: Cohort, islands: int) -> Bool[Array, " islands"]:
    valid = placed_valid_steps(cohort)
    return jnp.ones(islands, bool) if valid is None else federated_map(jnp.any, valid)
