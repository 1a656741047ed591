"""The replies that a guard drops: models with and without each of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fedpax.algorithm import Params
from fedpax.sites.coordinator_program import CoordinatorProgram
from fedpax.sites.coordinator_state import CoordinatorState
from fedpax.sites.merge_guard import MergeGuard
from fedpax.sites.stage_calls import Participants, StageCalls
from fedpax.sites.tasks import SiteReply
from fedpax.transforms.stages import Request

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
        server = program.serve(state)
        try:
            for message in (None, *earlier, reply):
                server.send(message)
        except StopIteration as end:
            state_after, _ = end.value
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
    """Yield each site with the merged terms of the other sites, in the order of the sites.

    It reads the terms of n sites n log2(n) times in all, and has log2(n) merged terms at a time.
    """
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
