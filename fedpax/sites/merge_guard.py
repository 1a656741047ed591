"""The guard of a coordinator: which updates of sites are not merged, and why."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedpax.algorithm import Params
from fedpax.sites.coordinator_program import CoordinatorProgram, CoordinatorState
from fedpax.sites.participants import Participants
from fedpax.sites.stage_calls import StageCalls
from fedpax.sites.tasks import SiteReply
from fedpax.sites.update_filters import NormHistory, drop_harmful, drop_large, parse_accept_if
from fedpax.transforms.stages import Request, drive

ModelOf = Callable[[frozenset[str]], Params]
"""Returns the model that the updates of some sites alone make; without any, the present model."""

ModelsWithoutEach = Callable[[tuple[str, ...]], Iterable[tuple[str, Params]]]
"""Yields each of some sites, in their order, with the model of the other sites' updates."""


class MergeGuard:
    """Drops updates by the rules of `fedpax.sites.update_filters`."""

    def __init__(
        self,
        norm_factor: float | None = None,
        accept_if: str | None = None,
        evaluate: Callable[[Params], Mapping[str, float]] | None = None,
    ) -> None:
        self._factor, self._evaluate = norm_factor, evaluate
        self._rule = parse_accept_if(accept_if) if accept_if else None
        self._history = NormHistory()

    @property
    def is_active(self) -> bool:
        """Whether replies may be dropped."""
        return self._factor is not None or self._rule is not None

    def drop(
        self,
        sites: Iterable[str],
        model_of: ModelOf,
        norms: Mapping[str, float] | None = None,
        models_without_each: ModelsWithoutEach | None = None,
    ) -> dict[str, str]:
        """Return the sites whose updates are not merged, with reasons."""
        dropped: dict[str, str] = {}
        if self._factor is not None:
            if norms is None:
                now = model_of(frozenset())
                norms = {site: float(_distance(model_of(frozenset({site})), now)) for site in sites}
            dropped, self._history = drop_large(norms, self._history, factor=self._factor)
        if self._rule is not None:
            evaluate = self._evaluate
            assert evaluate is not None
            left = [site for site in sites if site not in dropped]

            def evaluate_each(some: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, float]]]:
                assert models_without_each is not None
                for site, model in models_without_each(some):
                    yield site, evaluate(model)

            dropped |= drop_harmful(
                left,
                lambda some: evaluate(model_of(some)),
                self._rule,
                evaluate_without_each=None if models_without_each is None else evaluate_each,
            )
        return dropped

    def to_json(self) -> list[list[float]]:
        """Return what outlives the coordinator's process."""
        return [list(norms) for norms in self._history.rounds]

    def restore(self, saved: Iterable[Iterable[float]]) -> None:
        """Take over what an earlier process saved."""
        self._history = NormHistory(tuple(tuple(norms) for norms in saved))


@jax.jit
def _distance(model: Params, other: Params) -> jax.Array:
    squares = [
        jnp.sum(jnp.square(jnp.float32(x) - jnp.float32(y)))
        for x, y in zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True)
    ]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


Terms = Sequence[Any]


def drop_replies(
    guard: MergeGuard,
    calls: StageCalls,
    program: CoordinatorProgram,
    state: CoordinatorState,
    earlier: Sequence[Any],
    request: Request,
    replies: Mapping[str, SiteReply],
    who: Participants,
) -> dict[str, str]:
    """Return the sites whose replies to the last stage are not merged, with reasons."""
    stages = program.stages

    def finish(reply: tuple[Any, Any, list[int]]) -> Params:
        replies_in_order = iter([*earlier, reply])
        state_after, _ = drive(program.serve(state), lambda _: next(replies_in_order))
        params: Params = state_after.params
        return params

    def model_of(names: frozenset[str]) -> Params:
        some = {name: reply for name, reply in replies.items() if name in names}
        return finish(calls.merge(stages, request, some, who))

    def read(name: str) -> Terms:
        return calls.terms_of(stages, request, name, replies[name].arrays, who)

    def models_without_each(names: tuple[str, ...]) -> Iterator[tuple[str, Params]]:
        for site, terms in leave_one_out(names, read, stages.merge(request.stage)):
            slots = [slot for name in names if name != site for slot in who.slots[name]]
            yield site, finish((terms, [], slots))

    has_terms_alone = not stages[request.stage].shown
    return guard.drop(
        list(replies),
        model_of,
        models_without_each=models_without_each if has_terms_alone else None,
    )


def leave_one_out(
    sites: Sequence[str],
    read: Callable[[str], Terms],
    merge: Callable[[Terms, Terms], Terms],
    rest: Terms = (),
) -> Iterator[tuple[str, Terms]]:
    """Yield each site with the merged terms of the other sites, by n log2(n) reads."""
    if len(sites) == 1:
        yield sites[0], rest
        return

    def with_rest(others: Sequence[str]) -> Terms:
        total = rest
        for site in others:
            total = merge(total, read(site)) if len(total) else read(site)
        return total

    half = len(sites) // 2
    yield from leave_one_out(sites[:half], read, merge, with_rest(sites[half:]))
    yield from leave_one_out(sites[half:], read, merge, with_rest(sites[:half]))
