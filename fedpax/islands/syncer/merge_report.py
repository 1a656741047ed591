"""The report of a merge, and a run's counts over all merges."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedpax.islands.syncer.merge_votes import Vote

REPORTED = ("merge", "loss", "late", "staleness", "metrics")
"""The fields of a merge's report in `merges.jsonl`. Its updates have the other fields."""


class MergeReport(NamedTuple):
    """The report of one merge."""

    merge: int  # its number, from 1
    islands: tuple[str, ...]
    updates: int
    late: int  # number of these updates that had missed an earlier merge
    steps: int
    tokens: float
    # Mean of the updates' losses, weighted by their steps; in a robust merge the median of the
    # certificates' means.
    loss: float
    staleness: int  # the largest number of merges of the fragment that an update missed
    metrics: Mapping[str, float]  # of the aggregator


def read_report(merge: Mapping[str, Any]) -> MergeReport:
    """Read the report of a merge from its line of `merges.jsonl`."""
    updates = merge["updates"]
    return MergeReport(
        merge=merge["merge"],
        islands=tuple(sorted({update["island"] for update in updates})),
        updates=len(updates),
        late=merge["late"],
        steps=sum(update["steps"] for update in updates),
        tokens=sum(update["tokens"] for update in updates),
        loss=merge["loss"],
        staleness=merge["staleness"],
        metrics=merge["metrics"],
    )


class Totals(NamedTuple):
    """Counts since the run began, over all processes of the syncer."""

    tokens: float = 0.0  # of merged updates
    received_bytes: int = 0  # of updates
    sent_bytes: int = 0  # of fragments
    repeated: int = 0  # updates that came again and were not applied again
    # Updates dropped because their fragment was merged more than `max_staleness` times since their
    # first step.
    stale: int = 0
    not_finite: int = 0  # updates dropped because a value was NaN or infinite
    too_large: int = 0  # updates dropped because their norm was above `max_norm`
    guarded: int = 0  # votes of merges that a guard dropped

    def add(self, **counts: float) -> "Totals":
        """Add to some of the counts."""
        return self._replace(**{name: getattr(self, name) + n for name, n in counts.items()})


def make_report(
    merges: int, version: int, votes: Sequence[Vote], metrics: Mapping[str, float], *, robust: bool
) -> MergeReport:
    """Make the report of a merge."""
    updates = [update for vote in votes for of_island in vote.values() for update in of_island]
    return MergeReport(
        merge=merges + 1,
        islands=tuple(sorted({update.island for update in updates})),
        updates=len(updates),
        late=sum(update.merge < merges for update in updates),
        steps=sum(update.steps for update in updates),
        tokens=sum(update.tokens for update in updates),
        loss=mean_loss(votes, robust),
        staleness=max(version - update.base for update in updates),
        metrics=metrics,
    )


def mean_loss(votes: Sequence[Vote], robust: bool) -> float:
    """Return the mean loss over all steps, or in a robust merge the median of the votes."""
    # A minority cannot move the median beyond the values of all others.
    updates = [[update for of_island in vote.values() for update in of_island] for vote in votes]
    steps = [sum(update.steps for update in of_vote) for of_vote in updates]
    sums = [sum(update.loss * update.steps for update in of_vote) for of_vote in updates]
    if robust:
        return statistics.median(x / n for x, n in zip(sums, steps, strict=True))
    return sum(sums) / sum(steps)
