"""The guard of a syncer's merges: which votes are not merged, and why."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedpax.algorithm import Params
from fedpax.errors import ArgumentError
from fedpax.islands.syncer.outer_model import Contribution, OuterModel
from fedpax.islands.syncer.votes import Vote
from fedpax.sites.guards import parse_accept_if
from fedpax.sites.merge_guard import MergeGuard


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
