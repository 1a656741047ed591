"""The updates of islands, the votes and the guard of a merge, its report, and a run's counts."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpax.algorithm import AlgorithmParts, Params
from fedpax.errors import ArgumentError
from fedpax.islands.method_parts import check_arrays
from fedpax.islands.syncer.members import IslandRecord
from fedpax.islands.syncer.outer_model import Contribution, OuterModel
from fedpax.sites.guards import parse_accept_if
from fedpax.sites.merge_guard import MergeGuard
from fedpax.transport.admission import CheckedHeader
from fedpax.transport.calls import MalformedError

LARGEST_NORM, LARGEST_LOSS = 1e18, 1e38
"""Beyond them an update is dropped in any case: its square, or the sum of losses, overflows."""

REPORTED = ("merge", "loss", "late", "staleness", "metrics")
"""The fields of a merge's report in `merges.jsonl`. Its updates have the other fields."""


class Update(NamedTuple):
    """An update of a fragment that waits for its merge."""

    island: str
    incarnation: str
    sequence: int  # its number, which grows with each update of the process
    merge: int  # the merge that the island sent it for
    # the island's number of merges of the fragment when it encoded the update
    count: int  # type: ignore[assignment]  # hides tuple.count, which nothing uses
    base: int  # the island's number of merges of the fragment at the update's first step
    tokens: float  # tokens of its steps
    steps: int
    loss: float  # mean loss of the island's last S steps; NaN if it is not finite
    arrays: Mapping[str, np.ndarray]  # the encoded outer gradient
    shard: int  # the island's shard when it encoded the update

    def counting(self, steps: int) -> "Update":
        """Return the update with fewer steps, and tokens in proportion."""
        return self._replace(steps=steps, tokens=self.tokens * (steps / self.steps))


def read_update(
    request: CheckedHeader, arrays: Mapping[str, np.ndarray], shard: int, num_shards: int
) -> Update:
    """Read an update from the message that brings it."""
    # An update that was encoded for another shard than the island has now names it.
    stated = request.optional_count("shard")
    if stated is not None and stated >= num_shards:
        raise MalformedError(
            f"the update is encoded for shard {stated}, expected a number below {num_shards}. Use "
            "the same version of fedpax on both sides."
        )
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
        shard if stated is None else stated,
    )


def check_update(
    update: Update,
    p: int,
    version: int,
    tokens_per_step: float,
    wire_shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    """Refuse an update that no island of this run can have sent."""
    if not update.base <= update.count <= version:
        raise MalformedError(
            f"the update of fragment {p} begins at merge {update.base} and is encoded for "
            f"{update.count}, but the fragment has {version}. Stop this island; start it in "
            "an empty --job_log_dir."
        )
    if not 0 < update.tokens <= tokens_per_step * update.steps:
        raise MalformedError(
            f"the update claims {update.tokens:g} tokens in {update.steps} steps, expected at "
            f"most {tokens_per_step:g} per step. Use the same data settings everywhere."
        )
    if difference := check_arrays(update.arrays, wire_shapes):
        raise MalformedError(
            f"the update of fragment {p} has other parameters: {difference}. Use the same "
            "model and the same version of fedpax on both sides."
        )


def why_dropped(update: Update, norm: float, version: int, parts: AlgorithmParts) -> str:
    """Return why an update of this L2 norm is dropped, a count of `Totals`; "" if it is not."""
    if not math.isfinite(norm) or not abs(update.loss) < LARGEST_LOSS:
        return "not_finite"
    if norm > min(parts.max_norm or math.inf, LARGEST_NORM):
        return "too_large"
    return "stale" if version - update.base > parts.max_staleness else ""


class MergeReport(NamedTuple):
    """The report of one merge."""

    merge: int  # its number, from 1
    islands: tuple[str, ...]  # names of the islands in it
    updates: int  # number of updates in it
    late: int  # number of these updates that had missed an earlier merge
    steps: int  # inner steps in it
    tokens: float  # tokens of these steps
    # Mean of the updates' losses, weighted by their steps; in a robust merge the median of the
    # certificates' means.
    loss: float
    staleness: int  # the largest number of merges of the fragment that an update missed
    metrics: Mapping[str, float]  # the metrics of the aggregator


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

    tokens: float = 0.0  # tokens of merged updates
    received_bytes: int = 0  # bytes of the arrays of updates
    sent_bytes: int = 0  # bytes of the arrays of fragments
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


# The votes of a merge: one for each island, or in a robust merge one for each certificate.
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


# The guard of a syncer's merges: which votes are not merged, and why.
class GuardRules(NamedTuple):
    """The rules of `fedpax.sites.guards` for the merges of a run.

    Attributes:
        norm_factor: an update is dropped if its norm is above so many medians of recent norms of
            its fragment, at least 1. Default None: no limit.
        accept_if: a rule such as "loss+0.01" for the metrics of the merged model. Default None.
    """

    norm_factor: float | None = None
    accept_if: str | None = None

    def check(self) -> None:
        """Check the ranges."""
        if self.norm_factor is not None and not 1 <= self.norm_factor < math.inf:
            raise ArgumentError(
                f"norm_factor={self.norm_factor}, expected a number of at least 1. Set for example "
                "--norm_factor=3."
            )
        if self.accept_if:
            parse_accept_if(self.accept_if)


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
