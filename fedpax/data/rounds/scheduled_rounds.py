"""Streams of cohorts that are changed by round: schedules, weights, augmented images."""

from collections.abc import Callable, Iterator
from typing import Any

from fedpax.clients.cohort import Cohort, CohortStream, fingerprint


class ScheduledRounds:
    """A stream of cohorts, each changed by a function of the cohort and its round.

    Args:
        cohorts: the stream of cohorts.
        attach: `(cohort, round) -> cohort`, with rounds counted from 0.

    Example:
        >>> import numpy as np
        >>> from fedpax.data import token_rounds
        >>> sizes = dict(islands=1, local_steps=2, batch_size=1, seq_len=4)
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
