"""The updates that wait for a merge, the quorum that starts it, and limits of claims."""

from collections.abc import Callable, Collection, Iterable, Mapping

from fedpax.islands.syncer.members import IslandRecord
from fedpax.islands.syncer.updates import Update
from fedpax.transport.calls import RefusedError

MAX_WAITING = 16
"""Largest number of updates of one island and fragment that wait for a merge."""


class PendingUpdates:
    """The updates that are not in the saved model yet."""

    def __init__(self, num_fragments: int) -> None:
        self._waiting: list[dict[str, list[Update]]] = [{} for _ in range(num_fragments)]
        self._in_merge: dict[str, list[Update]] = {}
        self._merging: int | None = None

    def __len__(self) -> int:
        """Return the number of fragments."""
        return len(self._waiting)

    def find(self, p: int, island: str) -> list[Update]:
        """Return the updates of a fragment from an island, the newest one last."""
        waiting = self._waiting[p].get(island, [])
        return waiting if p != self._merging else self._in_merge.get(island, []) + waiting

    def newest(self, island: str) -> dict[int, tuple[str, int]]:
        """Return process and sequence number of an island's newest update of each fragment."""
        by_fragment = {p: self.find(p, island) for p in range(len(self))}
        return {
            p: (updates[-1].incarnation, updates[-1].sequence)
            for p, updates in by_fragment.items()
            if updates
        }

    def check_room(self, p: int, island: str) -> None:
        """Refuse one more update of a fragment from an island if too many of them wait."""
        if (number := len(self.find(p, island))) >= MAX_WAITING:
            raise RefusedError(
                f"{number} updates of fragment {p} of this island wait for a merge, expected at "
                f"most {MAX_WAITING}. Stop this island, and start it again later."
            )

    def add(self, p: int, update: Update) -> None:
        """Add an update of a fragment."""
        self._waiting[p].setdefault(update.island, []).append(update)

    def forget(self, island: str) -> None:
        """Forget the updates of an island that wait."""
        for waiting in self._waiting:
            waiting.pop(island, None)

    def on_time(self, p: int, merges: int) -> set[str]:
        """Return the islands that have sent a fragment for its next merge, or a later one."""
        return {
            island
            for island, updates in self._waiting[p].items()
            if any(update.merge >= merges for update in updates)
        }

    def begin_merge(self, p: int) -> Mapping[str, list[Update]]:
        """Move the updates of a fragment into a merge, and return them by island."""
        self._in_merge, self._waiting[p] = self._waiting[p], {}
        self._merging = p
        return self._in_merge

    def end_merge(self) -> None:
        """Forget the updates of the merge, which is saved."""
        self._in_merge, self._merging = {}, None


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


class StepCredit:
    """The inner steps that an island can have taken and not yet sent, fragment by fragment."""

    # An island takes at most M phases of S steps after a merge, and then waits. So each merge adds
    # M S steps to the credit of each fragment, and an update takes its steps from it. An honest
    # island never exceeds it: it starts with one merge more than it needs. The credit stays below P
    # + 2 merges, because each fragment is sent once in P merges. It starts full if the island can
    # have unsent steps (`returns`), as after a restart of the syncer.

    def __init__(
        self, num_fragments: int, steps_per_merge: int, merges: int, *, returns: bool
    ) -> None:
        self._per_merge, self._most = steps_per_merge, (num_fragments + 2) * steps_per_merge
        self._left = [self._most if returns else 2 * steps_per_merge] * num_fragments
        self._merges = [merges] * num_fragments

    def add_merge(self) -> None:
        """Add a merge to each fragment: an island that hears of a dropped update trains on too."""
        self._left = [min(left + self._per_merge, self._most) for left in self._left]

    def take(self, fragment: int, steps: int, merges: int) -> int:
        """Take the steps that an update claims; return how many count: at least 1."""
        earned = (merges - self._merges[fragment]) * self._per_merge
        left = min(self._left[fragment] + earned, self._most)
        counted = max(min(steps, left), 1)
        self._left[fragment], self._merges[fragment] = max(left - counted, 0), merges
        return counted


class StepCredits(dict[str, StepCredit]):
    """The credit of each island, by name."""

    def __init__(self, num_fragments: int, steps_per_merge: int) -> None:
        super().__init__()
        self._sizes = num_fragments, steps_per_merge

    def add(self, island: str, merges: int, *, returns: bool) -> None:
        """Begin the credit of an island."""
        self[island] = StepCredit(*self._sizes, merges, returns=returns)


# ---- a limit of the joins of each certificate: a join waits for a merge, and writes to the disk

JOINS_AT_ONCE = 20
SECONDS_PER_JOIN = 0.1


class JoinLimit:
    """Counts joins, so that one certificate leaves other certificates time to merge."""

    # Islands that wait for a shard ask half as often as the limit.

    def __init__(self, islands_per_certificate: int = 1) -> None:
        self._seconds = SECONDS_PER_JOIN / islands_per_certificate
        self._most = JOINS_AT_ONCE * SECONDS_PER_JOIN + self._seconds / 2  # against rounding
        self._until: dict[str, float] = {}  # by certificate: when its joins so far are paid off

    def count(self, peer: str, now: float) -> bool:
        """Count a join of a certificate; False if it comes too early, and is not counted."""
        if not peer:  # no certificates: all peers are on this machine
            return True
        until = max(self._until.get(peer, now), now) + self._seconds
        if until - now > self._most:
            return False
        self._until[peer] = until
        return True
