"""How a syncer ended."""

import signal
from typing import NamedTuple


class SyncerResult(NamedTuple):
    """The result of a syncer, of islands or of rounds over sites with data of their own.

    Attributes:
        rounds: completed rounds of the run. A round of islands has one merge per fragment.
        finished: whether all rounds are completed.
        signal: the signal that stopped the call, or None.
    """

    rounds: int
    finished: bool
    signal: signal.Signals | None
