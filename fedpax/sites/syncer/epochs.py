"""The epochs of a run: which merges of an island are in the history of the syncer's state."""

import secrets
from collections.abc import Sequence

KEPT = 64
"""Epochs that the manifest has, which is saved with each merge."""


class Epochs:
    """The processes of a syncer, each with a random name and the merge after which it started.

    A syncer that restores an older copy of its state loses merges that islands have. When it has
    done as many merges again, numbers no longer tell the two histories apart; epochs do. An island
    names the epoch in which it last joined. Its merges are in the history if this epoch is, and
    had as many merges before the next one began.

    Args:
        num_fragments: number of fragments, which are merged in turn.
        saved: the result of `to_json` in the saved state. Default: the run is new.
        merges: number of merges in the saved state. Default 0.

    Example:
        >>> first = Epochs(num_fragments=2)
        >>> name, saved = first.current, first.to_json()
        >>> restored = Epochs(2, saved, merges=3)  # from a copy; the newest state had 5 merges
        >>> restored.include(name, versions=[2, 1], merges=9)  # 3 merges
        True
        >>> restored.include(name, versions=[2, 2], merges=9)  # 4 merges
        False
    """

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
        """Return whether the merges of an island are in this history.

        Args:
            name: the epoch in which the island last joined; None if it has not joined yet.
            versions: its number of merges of each fragment; -1 or None for none yet.
            merges: the syncer's number of merges.
        """
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
