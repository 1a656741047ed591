"""Training over virtual time: cohorts with schedules, and rounds that report their second."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from fedpax.algorithm import FederatedAlgorithm, Metrics, State
from fedpax.clients.cohort import Cohort
from fedpax.clients.cohort_stream import CohortStream, fingerprint

VIRTUAL_SECONDS = "virtual_seconds"
"""Name of the metric: the second of simulated time at which a round ends."""


class TimedSchedule(NamedTuple):
    """The schedule of a round, and when the round ends."""

    schedule: chex.ArrayTree  # the method's schedule, such as `fedpax.clients.ArrivalOrder`
    # float32 `[participants]`, the second of simulated time at which the round ends, the same for
    # all of them
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


class ScheduledRounds:
    """A stream of cohorts, each changed by a function of the cohort and its round.

    Args:
        cohorts: the stream of cohorts.
        attach: `(cohort, round) -> cohort`, with rounds counted from 0. It adds a schedule, sets
            weights or augments images, for example.

    Example:
        >>> from fedpax.data import token_rounds
        >>> sizes = dict(islands=1, local_steps=1, batch_size=1, seq_len=4)
        >>> stream = ScheduledRounds(
        ...     token_rounds([{"text": "to be"}], **sizes),
        ...     lambda cohort, r: cohort._replace(num_steps=np.array([r])),
        ... )
        >>> [next(stream).num_steps.item() for _ in range(3)]
        [0, 1, 2]
    """

    def __init__(self, cohorts: CohortStream, attach: Callable[[Cohort, int], Cohort]) -> None:
        self._cohorts, self._attach = cohorts, attach
        self.num_clients: int | None = getattr(cohorts, "num_clients", None)
        self._round = 0

    def __iter__(self) -> Iterator[Cohort]:
        return self

    def fingerprint(self) -> dict[str, str]:
        """Return the fingerprint of the data: see `IdentifiedStream`."""
        return fingerprint(self._cohorts)

    def __next__(self) -> Cohort:
        """Return the cohort of the next round."""
        cohort = self._attach(next(self._cohorts), self._round)
        self._round += 1
        return cohort

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last round, as JSON values."""
        return {"round": self._round, "cohorts": self._cohorts.get_state()}

    def set_state(self, state: Any) -> None:
        """Move to a position from `get_state`."""
        cohorts = state["cohorts"]
        if isinstance(cohorts, dict) and "round" in cohorts:
            cohorts = cohorts | {"round": state["round"]}
        self._cohorts.set_state(cohorts)
        self._round = int(state["round"])
