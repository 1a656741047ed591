"""The epochs of a run: which merges of an island are in the history of the syncer's state."""

import secrets
from collections.abc import Sequence

KEPT = 64
"""Epochs that the manifest has, which is saved with each merge."""


class Epochs:
    """The processes of a syncer, each with a random name and the merge after which it started."""

    # A syncer that restores an older copy of its state loses merges that islands have. When it has
    # done as many merges again, numbers no longer tell the two histories apart; epochs do. An
    # island names the epoch in which it last joined. Its merges are in the history if this epoch
    # is, and had as many merges before the next one began.

    def __init__(
        self, num_fragments: int, saved: Sequence[tuple[str, int]] = (), merges: int = 0
    ) -> None:
        self._num_fragments = num_fragments
        self._epochs = [(name, start) for name, start in saved][1 - KEPT :]
        self._epochs.append((secrets.token_hex(8), merges))

    @property
    def current(self) -> str:
        """The name of the current epoch."""
        return self._epochs[-1][0]

    def include(self, name: str | None, versions: Sequence[int] | None, merges: int) -> bool:
        """Return whether an island's merges are in this history; None: it has none yet."""
        if name is None or versions is None:
            return True
        newest = max(
            (version - 1) * self._num_fragments + p + 1 if version > 0 else 0
            for p, version in enumerate(versions)
        )
        ends = [*(start for _, start in self._epochs[1:]), merges]
        return any(
            name == known and newest <= end
            for (known, _), end in zip(self._epochs, ends, strict=True)
        )

    def to_json(self) -> list[list[str | int]]:
        """Return the epochs as JSON values."""
        return [list(epoch) for epoch in self._epochs]
