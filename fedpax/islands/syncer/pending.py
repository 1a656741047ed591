"""The updates that wait for a merge, or are in the current one, by fragment and island."""

from collections.abc import Mapping

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
