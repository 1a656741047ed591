"""Let a method compute while the two transfers of an aggregator are under way."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TypeAlias

import chex

TransferWork: TypeAlias = Callable[[chex.ArrayTree, float], chex.ArrayTree]

_work: contextvars.ContextVar[TransferWork | None] = contextvars.ContextVar("work", default=None)


@contextlib.contextmanager
def under_transfers(work: TransferWork) -> Iterator[None]:
    """Do a method's work under the transfers of the aggregators in this context."""
    # A method such as `streaming_diloco` hides a transfer behind local steps that do not depend on
    # it. If an aggregator has two transfers, and the second one depends on the first, each needs
    # separate steps. The aggregator then calls `work_under_transfer` after each of them. An
    # aggregator with a single transfer does not: the method does its work after `aggregate`.
    token = _work.set(work)
    try:
        yield
    finally:
        _work.reset(token)


def work_under_transfer(received: chex.ArrayTree, *, fraction: float) -> chex.ArrayTree:
    """Do the work of `under_transfers`, if there is any, up to a fraction."""
    work = _work.get()
    return received if work is None else work(received, fraction)
