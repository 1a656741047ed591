"""The ledger of an island: the sent and the unsent progress of each fragment."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class FragmentLedger:
    """The progress of one fragment."""

    # Number of merges of the outer parameters that the island has; -1 for none yet.
    version: int = -1
    base: int = -1  # the version at the first unsent step
    steps: int = 0  # number of unsent inner steps
    tokens: float = 0.0  # tokens of the unsent steps
    last_sent: tuple[str, int] = ("", 0)  # process and sequence number of the newest update

    def forget(self) -> None:
        """Count no step as unsent."""
        self.steps, self.tokens, self.base = 0, 0.0, self.version


class Ledger:
    """The progress of all fragments, and the rule that chooses the fragment to send next."""

    # An island sends the fragment that the syncer merges next. If it has sent this fragment
    # already, it sends the one after it. Thus an island that is late skips to the syncer's merge. A
    # fragment that an island has not sent for two rounds of its own steps is sent in addition.

    def __init__(self, num_fragments: int, steps_per_sync: int) -> None:
        self.fragments = [FragmentLedger() for _ in range(num_fragments)]
        self.sequence = 0
        self.last_merge = -1
        self.epoch: str | None = None
        self._starved = 2 * num_fragments * steps_per_sync

    def add_steps(self, steps: int, tokens: float) -> None:
        """Count inner steps and their tokens."""
        for fragment in self.fragments:
            fragment.steps += steps
            fragment.tokens += tokens

    def next_merge(self, merges: int) -> int | None:
        """Return the merge of the next update; None if it is too early for an update."""
        merge = max(self.last_merge + 1, merges)
        return merge if merge <= merges + 1 else None

    def starved_fragment(self, but: int | None) -> int | None:
        """Return a fragment, other than `but`, that was not sent for two rounds, or None."""
        starved = [
            p
            for p, fragment in enumerate(self.fragments)
            if p != but and fragment.steps >= self._starved
        ]
        return max(starved, key=lambda p: self.fragments[p].steps, default=None)

    def sent(self, p: int, process: str, merge: int | None) -> None:
        """Record that an update of fragment p was made."""
        self.sequence += 1
        self.fragments[p].last_sent = process, self.sequence
        self.fragments[p].forget()
        if merge is not None:
            self.last_merge = merge

    def was_dropped(self, merge: int | None) -> None:
        """Record that the syncer dropped the update for a merge: the merge needs another one."""
        if merge is not None:
            self.last_merge = min(self.last_merge, merge - 1)

    def received(self, p: int, version: int) -> None:
        """Record outer parameters of fragment p."""
        fragment = self.fragments[p]
        fragment.version = version
        if not fragment.steps:
            fragment.base = version

    def discard(self) -> None:
        """Forget the unsent steps, and the outer parameters that the island has."""
        for fragment in self.fragments:
            fragment.version = -1
            fragment.forget()
        self.last_merge = -1

    def versions(self) -> list[int]:
        """Return the version of each fragment."""
        return [fragment.version for fragment in self.fragments]

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as JSON values."""
        return {
            "sequence": self.sequence,
            "last_merge": self.last_merge,
            "epoch": self.epoch,
            "fragments": [dataclasses.asdict(fragment) for fragment in self.fragments],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore a ledger from the result of `to_json`."""
        self.sequence, self.last_merge = saved["sequence"], saved["last_merge"]
        self.epoch = saved.get("epoch")
        self.fragments = [
            FragmentLedger(**{**fragment, "last_sent": tuple(fragment["last_sent"])})
            for fragment in saved["fragments"]
        ]
