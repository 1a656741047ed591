"""The votes of a merge: one for each island, or in a robust merge one for each certificate."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedpax.algorithm import Params
from fedpax.islands.syncer.members import IslandRecord
from fedpax.islands.syncer.outer_model import Contribution
from fedpax.islands.syncer.updates import MergeReport, Update

Vote = Mapping[int, Sequence[Update]]
"""The updates of the islands that have one vote in a merge, by shard."""

MOST_WEIGHT = 8.0
"""No vote weighs more per second than this many times the median of all other votes in a merge."""

LEAST_SECONDS = 1.0
"""Shorter times than this count as equal."""


def group_votes(
    islands: Iterable[IslandRecord], updates: Mapping[str, Sequence[Update]], by_certificate: bool
) -> list[Vote]:
    """Group the updates of a merge by vote."""
    # With `by_certificate`, as in a median, the islands of a certificate have one vote: else a site
    # with two islands has two of three votes. Without it each island has one, because a weighted
    # mean adds weights and does not count.
    votes: dict[str, dict[int, Sequence[Update]]] = {}
    for island in islands:
        if island.shard is not None and (of_island := updates.get(island.name)):
            voter = island.voter if by_certificate else island.name
            votes.setdefault(voter, {})[island.shard] = of_island
    return [votes[voter] for voter in sorted(votes, key=lambda voter: min(votes[voter]))]


def combine(
    decode: Callable[..., Params], votes: Sequence[Vote], seconds: Mapping[str, float]
) -> list[Contribution]:
    """Decode the updates of a merge, and combine the updates of each vote."""
    # An island's updates are added: they are its steps since its last part in a merge. The islands
    # of a vote are averaged by weight, tokens^2 / steps. `seconds`: in which each island, by name,
    # can have taken its steps.
    weights = [[_weight(updates) for updates in vote.values()] for vote in votes]
    spans = [max(seconds[updates[0].island] for updates in vote.values()) for vote in votes]
    limited = limit_weights([sum(of_vote) for of_vote in weights], spans)
    return [
        Contribution(min(vote), _average(decode, vote, of_vote), weight)
        for vote, of_vote, weight in zip(votes, weights, limited, strict=True)
    ]


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


def limit_weights(weights: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Limit each weight per second to `MOST_WEIGHT` times the median of all other ones."""
    # So a claim of many steps has a bounded weight, and an island that returns after a long time
    # has the weight of all of its steps. The result is divided by its largest weight. `seconds`:
    # since each one's last part in a merge of the fragment.
    spans = [max(span, LEAST_SECONDS) for span in seconds]
    rates = [weight / span for weight, span in zip(weights, spans, strict=True)]
    limited = []
    for i, (weight, span) in enumerate(zip(weights, spans, strict=True)):
        other_rates = [rate for rate in (*rates[:i], *rates[i + 1 :]) if rate > 0]
        most = MOST_WEIGHT * statistics.median(other_rates) * span if other_rates else weight
        limited.append(min(weight, most))
    largest = max(limited)
    return [weight / largest if largest > 0 else 1.0 for weight in limited]


def _average(decode: Callable[..., Params], vote: Vote, weights: Sequence[float]) -> Params:
    """Return the mean of a vote's islands, one update in memory at a time."""
    total, mean = sum(weights), None
    for (_, updates), weight in zip(vote.items(), weights, strict=True):
        share = np.float32(weight / total if total > 0 else 1 / len(vote))
        for update in updates:
            decoded: Any = decode(dict(update.arrays), update.shard, update.count)
            part = jax.tree.map(lambda x, share=share: share * np.asarray(x), decoded)
            mean = part if mean is None else jax.tree.map(np.add, mean, part)
    return mean


def _weight(updates: Sequence[Update]) -> float:
    """Return the weight of an island in a merge: tokens^2 / steps."""
    tokens: float = sum(update.tokens for update in updates)
    return tokens * (tokens / sum(update.steps for update in updates))
