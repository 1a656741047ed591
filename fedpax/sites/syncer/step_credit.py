"""The inner steps that an island can have taken, by which the steps that it claims are limited."""


class StepCredit:
    """The inner steps that an island can have taken and not yet sent, fragment by fragment.

    An island takes at most M phases of S steps after a merge that it has received, and then waits.
    So with each merge of the run, M S steps are added to the credit of each fragment; an update
    takes its steps from it. No island that keeps to the protocol exceeds its credit, however fast
    it is: it starts with one merge more than it needs. The credit stays below P + 2 merges, because
    each fragment is sent at least once in P merges that the island receives.

    Args:
        num_fragments: P.
        steps_per_merge: M S.
        merges: number of merges of the run now.
        returns: whether the island can have unsent steps from earlier, as after a restart of the
            syncer. Its credit is then full.

    Example:
        >>> credit = StepCredit(num_fragments=2, steps_per_merge=64, merges=0, returns=False)
        >>> credit.take(0, 2**40, merges=0)
        128
        >>> credit.take(0, 2, merges=1), credit.take(1, 2**40, merges=1)
        (2, 192)
    """

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
        """Take the steps of an update from the credit.

        Args:
            fragment: the update's fragment.
            steps: its steps, as the island claims them.
            merges: number of merges of the run now.

        Returns:
            The steps that count: at most the credit, and at least 1.
        """
        earned = (merges - self._merges[fragment]) * self._per_merge
        left = min(self._left[fragment] + earned, self._most)
        counted = max(min(steps, left), 1)
        self._left[fragment], self._merges[fragment] = max(left - counted, 0), merges
        return counted
