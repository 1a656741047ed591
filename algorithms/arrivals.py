"""Arrivals: which islands of a round arrive at a server, and which of them send an update."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fedpax.algorithms.local_steps import placed_valid_steps
from fedpax.clients.cohort import Cohort
from fedpax.primitives import federated_map


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


def sending(cohort: Cohort, islands: int) -> Bool[Array, " islands"]:
    """Return which islands have a valid step, and so an update to send. Inside a program.

    Args:
        cohort: the cohort of the round.
        islands: number of islands.

    Returns:
        bool `[islands]`, placed.
    """
    valid = placed_valid_steps(cohort)
    return jnp.ones(islands, bool) if valid is None else federated_map(jnp.any, valid)
