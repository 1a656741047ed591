"""The quorum of a merge, and the grace window in which the merge waits for the other islands."""

from collections.abc import Callable, Collection, Iterable

from fedpax.islands.syncer.members import IslandRecord


class Quorum:
    """When the next fragment is merged: after its quorum, and the grace window that follows it."""

    def __init__(
        self,
        voters: int,
        grace_seconds: float,
        heartbeat_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._voters, self._grace, self._heartbeat = voters, grace_seconds, heartbeat_seconds
        self._clock = clock
        self._deadline: float | None = None

    def is_due(self, islands: Iterable[IslandRecord], on_time: Collection[str]) -> bool:
        """Return whether a merge is due, whose updates the islands `on_time` have sent."""
        members = list(islands)
        if len({island.voter for island in members if island.name in on_time}) < self._voters:
            self._deadline = None
            return False
        now = self._clock()
        if self._deadline is None:
            self._deadline = now + self._grace
        training = ("starting", "training")
        alive = {i.name for i in members if i.state(now, self._heartbeat) in training}
        return now >= self._deadline or alive.issubset(on_time)

    def begin_merge(self) -> None:
        """Wait anew: the next merge has a grace window of its own."""
        self._deadline = None
