"""Training over virtual time: schedules with times, and rounds that report their second."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from fedpax.algorithm import FederatedAlgorithm, Metrics, State
from fedpax.clients.cohort import Cohort

VIRTUAL_SECONDS = "virtual_seconds"
"""Name of the metric: the second of simulated time at which a round ends."""


class TimedSchedule(NamedTuple):
    """The schedule of a round, and when the round ends."""

    schedule: chex.ArrayTree  # the method's schedule, such as `fedpax.clients.ArrivalOrder`
    # float32 `[participants]`, the simulated second at which the round ends, the same for all
    seconds: Float[jax.Array | np.ndarray, " participants"]


def with_virtual_seconds(algorithm: FederatedAlgorithm) -> FederatedAlgorithm:
    """Report the simulated time of each round, as the metric `"virtual_seconds"`.

    Example:
        >>> import optax
        >>> from fedpax.algorithms import async_diloco
        >>> from fedpax.clients import ArrivalOrder
        >>> algorithm = with_virtual_seconds(async_diloco(
        ...     lambda w, x: (jnp.mean((w - x) ** 2), {}),
        ...     islands=2,
        ...     inner_optimizer=optax.sgd(0.5),
        ... ))
        >>> order = ArrivalOrder(np.array([0, 1]))
        >>> cohort = Cohort(jnp.ones((2, 1, 3)), schedule=TimedSchedule(order, np.full(2, 7.5)))
        >>> _, metrics = algorithm.round(algorithm.init(jnp.float32(0.0)), cohort)
        >>> metrics["virtual_seconds"].item()
        7.5
    """

    def timed_round(state: State, cohort: Cohort, *frozen: Any) -> tuple[State, Metrics]:
        timed: Any = cohort.schedule
        state, metrics = algorithm.round(state, cohort._replace(schedule=timed.schedule), *frozen)
        return state, metrics | {VIRTUAL_SECONDS: jnp.max(timed.seconds).astype(jnp.float32)}

    return algorithm._replace(round=timed_round)
