"""The updates of islands, the report of a merge, and the counts of a run."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedpax.sites.requests import Request


class Update(NamedTuple):
    """An update of a fragment that waits for its merge.

    Attributes:
        island: the island's name.
        incarnation: its process.
        sequence: its number, which grows with each update of the process.
        merge: the merge that the island sent it for.
        count: the island's number of merges of the fragment when it encoded the update.
        base: the island's number of merges of the fragment at the update's first step.
        tokens: tokens of its steps.
        steps: its inner steps.
        loss: mean loss of the island's last S steps; NaN if it is not finite.
        arrays: the encoded outer gradient.
    """

    island: str
    incarnation: str
    sequence: int
    merge: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nothing uses
    base: int
    tokens: float
    steps: int
    loss: float
    arrays: Mapping[str, np.ndarray]


def read_update(request: Request, arrays: Mapping[str, np.ndarray]) -> Update:
    """Read an update from the message that brings it.

    Raises:
        RefusedError: a field is missing or has another type.
    """
    return Update(
        request.text("island"),
        request.text("incarnation"),
        request.count("sequence", least=1),
        request.count("merge"),
        request.count("count"),
        request.count("base"),
        request.number("tokens"),
        request.count("update_steps", least=1),
        request.number("loss"),
        arrays,
    )


class MergeReport(NamedTuple):
    """The report of one merge.

    Attributes:
        merge: its number, from 1.
        islands: names of the islands in it.
        updates: number of updates in it.
        late: number of these updates that had missed an earlier merge.
        steps: inner steps in it.
        tokens: tokens of these steps.
        loss: mean of the updates' losses, weighted by their steps.
        staleness: the largest number of merges of the fragment that an update missed.
        metrics: the metrics of the aggregator.
    """

    merge: int
    islands: tuple[str, ...]
    updates: int
    late: int
    steps: int
    tokens: float
    loss: float
    staleness: int
    metrics: Mapping[str, float]


class Totals(NamedTuple):
    """Counts since the run began, over all processes of the syncer.

    Attributes:
        tokens: tokens of merged updates.
        received_bytes: bytes of the arrays of updates.
        sent_bytes: bytes of the arrays of fragments.
        repeated: updates that came again and were not applied again.
        stale: updates dropped because their fragment was merged more than `max_staleness` times
            since their first step.
        not_finite: updates dropped because a value was NaN or infinite.
        too_large: updates dropped because their norm was above `max_norm`.
    """

    tokens: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0
    repeated: int = 0
    stale: int = 0
    not_finite: int = 0
    too_large: int = 0

    def add(self, **counts: float) -> "Totals":
        """Add to some of the counts."""
        return self._replace(**{name: getattr(self, name) + n for name, n in counts.items()})
