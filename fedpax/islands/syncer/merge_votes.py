"""The votes of a merge: one for each island, or in a robust merge one for each certificate."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpax.algorithm import Params
from fedpax.islands.syncer.members import IslandRecord
from fedpax.islands.syncer.outer_model import Contribution, OuterModel
from fedpax.islands.syncer.updates import Update
from fedpax.sites.merge_guard import MergeGuard
from fedpax.sites.update_filters import check_guards

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
    # with two islands has two of three. A weighted mean does not count votes.
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
    # An island's updates are added. The islands of a vote are averaged by weight, tokens^2 / steps.
    # `seconds`: in which each island can have taken its steps.
    weights = [[_weight(updates) for updates in vote.values()] for vote in votes]
    spans = [max(seconds[updates[0].island] for updates in vote.values()) for vote in votes]
    limited = limit_weights([sum(of_vote) for of_vote in weights], spans)
    return [
        Contribution(min(vote), _average(decode, vote, of_vote), weight)
        for vote, of_vote, weight in zip(votes, weights, limited, strict=True)
    ]


def limit_weights(weights: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Limit each weight per second to `MOST_WEIGHT` times the median of all other ones."""
    # So a claim of many steps has a bounded weight, and an island that was long away keeps its. The
    # result is divided by its largest weight. `seconds`: since each one's last part in a merge of
    # the fragment.
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


class GuardRules(NamedTuple):
    """The rules of `fedpax.sites.update_filters` for the merges of a run.

    Attributes:
        norm_factor: an update is dropped if its norm is above so many medians of recent norms of
            its fragment, at least 1. Default None: no limit.
        accept_if: a rule such as "loss+0.01" for the metrics of the merged model. Default None.
    """

    norm_factor: float | None = None
    accept_if: str | None = None

    def check(self) -> None:
        """Check the ranges."""
        check_guards(*self)


NO_GUARDS = GuardRules()


class GuardedMerges:
    """Drops votes of merges. Each fragment has norms of its own."""

    def __init__(
        self,
        rules: GuardRules,
        num_fragments: int,
        evaluate: Callable[[Params], Mapping[str, float]] | None = None,
    ) -> None:
        self._guards = [MergeGuard(*rules, evaluate) for _ in range(num_fragments)]

    @property
    def is_active(self) -> bool:
        """Whether votes may be dropped."""
        return self._guards[0].is_active

    def drop(
        self,
        model: OuterModel,
        p: int,
        votes: Sequence[Vote],
        contributions: Sequence[Contribution],
    ) -> dict[str, str]:
        """Return the names of the votes of a merge that do not count, with reasons."""
        if not self._guards[p].is_active:
            return {}
        named = dict(zip(map(name_vote, votes), contributions, strict=True))

        def model_of(names: frozenset[str]) -> Params:
            if not names:
                return model.params()
            state, _ = model.merge(p, [x for name, x in named.items() if name in names])
            states = [*model.fragments]
            states[p] = state
            return model.params(states)

        norms = {name: gradient_norm(contribution.gradient) for name, contribution in named.items()}
        return self._guards[p].drop(named, model_of, norms)

    def to_json(self) -> list[list[list[float]]]:
        """Return what outlives the syncer's process."""
        return [guard.to_json() for guard in self._guards]

    def restore(self, saved: Sequence[Sequence[Sequence[float]]]) -> None:
        """Take over what an earlier process saved."""
        for guard, norms in zip(self._guards, saved, strict=False):
            guard.restore(norms)


def name_vote(vote: Vote) -> str:
    """Return the names of the islands of a vote."""
    return ", ".join(sorted({update.island for updates in vote.values() for update in updates}))


def leave_out(
    dropped: Mapping[str, str], votes: Sequence[Vote], contributions: Sequence[Contribution]
) -> tuple[list[Vote], list[Contribution]]:
    """Return the votes that were not dropped, and their contributions."""
    pairs = zip(votes, contributions, strict=True)
    left = [(vote, x) for vote, x in pairs if name_vote(vote) not in dropped]
    return [vote for vote, _ in left], [x for _, x in left]


def gradient_norm(gradient: Params) -> float:
    """Return the L2 norm of a gradient in the host's memory."""
    squares = [np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(gradient)]
    return math.sqrt(sum(squares))
